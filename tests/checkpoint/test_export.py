"""A checkpoint of any strategy is exported with the logits that were trained, and resumed by another strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dist_template import InputError
from tests.support.formats import write_distributed
from tests.support.library import ZeroFormat, formats, read_full
from tests.support.parity import MODELS
from tests.support.runs import OURS, SMALL_LLAMA, Workers, logged, newest, only_run, run
from tests.support.wings import export

TIED_LLAMA = SMALL_LLAMA[:-1] + ", tie_word_embeddings: true}"


# ---- exporting -----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(flags: list[str]) -> list[str]:
    """Four steps, no validation."""
    return [*flags, "--trainer.max_steps=4", "--trainer.limit_val_batches=0", "--last_checkpoint.every_n_steps=2"]


def exported(flags: list[str], output: Path, checkpoint: Any = "last") -> Any:
    """The model as anyone would load it."""
    from transformers import AutoModelForCausalLM

    ours = [flag for flag in flags if not flag.startswith(("--trainer.", "--last_checkpoint."))]
    export.main(["export", *ours, f"--checkpoint={checkpoint}", f"--output={output}"], OURS)
    return AutoModelForCausalLM.from_pretrained(output).eval()


@pytest.mark.parametrize("architecture", [MODELS["deepseek_v3"], TIED_LLAMA], ids=["deepseek_v3", "tied_llama"])
def test_the_exported_folder_gives_the_trained_modules_logits(
    quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], architecture: str
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


def test_weights_in_bfloat16_keep_what_must_stay_in_float32(quick: list[str], tmp_path: Path) -> None:
    quick = [*quick, f"--model.architecture={MODELS['deepseek_v3']}"]
    assert run("fit", *quick) == 0
    model = exported([*quick, "--dtype=bfloat16"], tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32  # routing depends on it


REFUSED = {
    "no such checkpoint": (["--checkpoint=nowhere.ckpt"], "nowhere.ckpt.* does not exist"),
    "nothing under that name": (["--run.name=other", "--checkpoint=last"], "no checkpoint under"),
    "a full folder": (["--output={tmp}", "--checkpoint=last"], "is not an empty folder"),
    "a file in the way": (["--output={tmp}/corpus.txt", "--checkpoint=last"], "is not an empty folder"),
    "another model": (["--model.architecture.hidden_size=64"], r"its model\..* is \(257, 32\).* it is \(257, 64\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_is_refused(quick: list[str], tmp_path: Path, case: str) -> None:
    (tmp_path / "corpus.txt").write_text("in the way")
    assert run("fit", *quick, "--trainer.max_steps=1") == 0
    wrong, message = REFUSED[case]
    wrong = [flag.replace("{tmp}", str(tmp_path)) for flag in wrong]
    ours = [flag for flag in quick if not flag.startswith(("--trainer.", "--last_checkpoint."))]
    with pytest.raises(InputError, match=message):
        export.main(["export", *ours, "--checkpoint=last", f"--output={tmp_path}/out", *wrong], OURS)
    assert not list(tmp_path.glob("*out*"))


# ---- resuming under another strategy -------------------------------------------------------------------------------


def test_a_distributed_checkpoint_resumes_as_the_file_does(quick: list[str], tmp_path: Path) -> None:
    assert run("fit", *quick, "--run.name=file", "--trainer.max_steps=2") == 0
    full = read_full(newest(only_run(tmp_path, "file")))
    weights, (state,) = full.pop("state_dict"), full.pop("optimizer_states")
    write_distributed(tmp_path / "folder", weights, state, full)

    for checkpoint in (newest(only_run(tmp_path, "file")), tmp_path / "folder"):  # as `export` reads it
        alone = read_full(checkpoint, optimizer=False)
        assert "optimizer_states" not in alone and alone["state_dict"].keys() == weights.keys()

    for name, checkpoint in (("file", "last"), ("folder", tmp_path / "folder")):
        assert run("fit", *quick, f"--run.name={name}", f"--ckpt_path={checkpoint}") == 0
    ends = [read_full(newest(only_run(tmp_path, name))) for name in ("file", "folder")]
    assert [end["global_step"] for end in ends] == [4, 4]
    assert ends[0]["DataModule"] == ends[1]["DataModule"]
    for name, tensor in ends[0]["state_dict"].items():
        assert torch.equal(tensor, ends[1]["state_dict"][name]), name
        moments = [end["optimizer_states"][0]["state"][name]["exp_avg"] for end in ends]
        assert torch.equal(*moments), name


def test_a_checkpoint_without_optimizer_state_says_so_in_one_sentence(
    quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fit", *quick, "--trainer.max_steps=2") == 0
    full = read_full(newest(only_run(tmp_path)))
    weights = full.pop("state_dict")
    del full["optimizer_states"]
    dcp.save({"state_dict": weights}, checkpoint_id=tmp_path / "folder", no_dist=True)
    torch.save(full, tmp_path / "folder/meta.pt")
    capsys.readouterr()
    assert run("fit", *quick, "--run.name=anew", f"--ckpt_path={tmp_path}/folder") == 0
    assert capsys.readouterr().out.count("no optimizer state") == 1
    rates = logged(only_run(tmp_path, "anew"), "train/learning_rate")
    assert run("fit", *quick, "--run.name=whole") == 0
    whole = logged(only_run(tmp_path, "whole"), "train/learning_rate")
    assert rates == {step: whole[step] for step in (3, 4)}, "the schedule goes on where it was"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_own_folder_measures_and_exports_as_it_was_trained(
    quick: list[str], tmp_path: Path, stage: int
) -> None:
    flags = [*quick, f"--model.architecture={MODELS['deepseek_v3']}", "--trainer.limit_val_batches=1.0"]
    zero = ["--trainer.devices=2", "--trainer.strategy=ZeroStrategy", f"--trainer.strategy.stage={stage}"]
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
