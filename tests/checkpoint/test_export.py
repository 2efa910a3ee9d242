"""A checkpoint of any strategy is exported with the logits that were trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import CaptureFixture

from tests.support.library import ZeroFormat, formats
from tests.support.parity import MODELS
from tests.support.runs import OURS, SMALL_LLAMA, Workers, logged, newest, only_run, run
from tests.support.wings import export

TIED_LLAMA = SMALL_LLAMA[:-1] + ", tie_word_embeddings: true}"


@pytest.fixture
def quick(flags: list[str]) -> list[str]:
    """Four steps, no validation."""
    four = ["--trainer.max_steps=4", "--trainer.limit_val_batches=0"]
    return [*flags, *four, "--last_checkpoint.every_n_steps=2"]


def exported(flags: list[str], output: Path, checkpoint: Any = "last") -> Any:
    """The model as anyone would load it."""
    from transformers import AutoModelForCausalLM

    ours = [flag for flag in flags if not flag.startswith(("--trainer.", "--last_checkpoint."))]
    export.main(["export", *ours, f"--checkpoint={checkpoint}", f"--output={output}"], OURS)
    return AutoModelForCausalLM.from_pretrained(output).eval()


@pytest.mark.parametrize("architecture", [MODELS["deepseek_v3"], TIED_LLAMA], ids=["moe", "tied"])
def test_the_exported_folder_gives_the_trained_modules_logits(
    quick: list[str], tmp_path: Path, capsys: CaptureFixture, architecture: str
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    quick = [*quick, f"--model.architecture={architecture}"]
    assert run("fit", *quick) == 0
    model = exported(quick, tmp_path / "out")
    assert "100.0% of the greedy tokens equal\n" in capsys.readouterr().out

    # The same from the checkpoint's own tensors, by no code of ours.
    trained = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "out")).eval()
    state = torch.load(newest(only_run(tmp_path)) / "checkpoint.pt")["state_dict"]
    trained.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    tokens = torch.arange(60).view(2, 30)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, trained(tokens).logits)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode([72, 105]) == "Hi"
    assert model.generation_config.eos_token_id == model.config.eos_token_id
    assert sorted(p.name for p in tmp_path.glob("*out*")) == ["out"], "nothing unfinished is left"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_own_folder_is_read(quick: list[str], tmp_path: Path, stage: int) -> None:
    """It measures and exports as it was trained."""
    flags = [*quick, f"--model.architecture={MODELS['deepseek_v3']}"]
    flags += ["--trainer.limit_val_batches=1.0"]
    zero = ["--trainer.devices=2", "--trainer.strategy=ZeroStrategy"]
    zero += [f"--trainer.strategy.stage={stage}"]
    with Workers(2) as workers:
        workers.run(["prepare", *flags], tmp_path / "prepare").check()
        workers.run(["fit", *flags, *zero], tmp_path / "fit").check()
    trained = logged(only_run(tmp_path), "eval/loss")[4]
    path = newest(only_run(tmp_path))
    assert formats.format_of(path) is ZeroFormat
    assert run("validate", *flags, "--run.name=one", f"--ckpt_path={path}") == 0
    (measured,) = logged(only_run(tmp_path, "one"), "eval/loss").values()
    assert measured == pytest.approx(trained, rel=1e-6)
    exported(flags, tmp_path / "out", path)
