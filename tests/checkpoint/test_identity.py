"""What a resumed run trains on is compared with what its checkpoint was trained on."""

from pathlib import Path
from typing import Any

import pytest
from pytest import CaptureFixture

from dist_template.checkpoint.identity import KEY
from tests.support.library import manifest, read_full
from tests.support.runs import OURS, SMALL_LLAMA, newest, only_run, refused, run
from tests.support.wings import export

pytestmark = pytest.mark.slow
ON = ["--ckpt_path=last", "--trainer.max_steps=4"]
FIXED = {  # each change, and what is said of it
    "data.seq_len=16": "data.seq_len 32, now 16",
    "data.seed=3": "data.seed 0, now 3",
    "data.cross_document_attention=true": "data.cross_document_attention False, now True",
    "data.validation_share=0.3": "data.source",
    "model.architecture.num_attention_heads=4": "model.architecture.num_attention_heads 2, now 4",
    "model.adapter.alpha=16": "model.adapter.alpha 8.0, now 16.0",
}


@pytest.fixture
def flags(flags: list[str]) -> list[str]:
    more = ["--trainer.max_steps=2", "--trainer.logger=false", "--model.optim.warmup=1"]
    return [*flags, *more, "--model.sample_tokens=1", "--trainer.val_check_interval=2"]


def test_a_changed_setting_is_refused_and_can_be_accepted(
    flags: list[str], tmp_path: Path, capfd: CaptureFixture
) -> None:
    flags = [*flags, "--model.adapter.alpha=8", "--model.adapter.targets=[q_proj]"]
    assert run("fit", *flags) == 0
    before = sorted(path.name for path in only_run(tmp_path).iterdir())
    for change, said in FIXED.items():
        assert run("prepare", *flags, f"--{change}") == 0
        error = refused("fit", [*flags, *ON, f"--{change}"], capfd)
        assert f"was trained with {said}" in error
        assert f"--last_checkpoint.accept_changes '[{said.split()[0]}" in error
    assert sorted(path.name for path in only_run(tmp_path).iterdir()) == before
    capfd.readouterr()
    accepted = "--last_checkpoint.accept_changes=[data.seq_len,data.seed]"
    assert run("fit", *flags, *ON, "--data.seq_len=16", "--data.seed=3", accepted) == 0
    shown = capfd.readouterr().out
    assert "data.seq_len 32 -> 16\n" in shown and "data.seed 0 -> 3\n" in shown
    assert manifest.read(newest(only_run(tmp_path)))[KEY]["data.seq_len"] == 16


def test_another_model_is_refused(flags: list[str], tmp_path: Path, capfd: CaptureFixture) -> None:
    """The weights of llama, mistral and granite have the same names and shapes."""
    assert run("fit", *flags) == 0
    for kind in ("mistral", "granite"):
        architecture = SMALL_LLAMA.replace("llama", kind).replace("}", ", attention_dropout: 0.1}")
        error = refused("fit", [*flags, *ON, f"--model.architecture={architecture}"], capfd)
        assert f"was trained with model.architecture.model_type llama, now {kind}: restore" in error
    extra = SMALL_LLAMA.replace("}", ", extra: {scale: 2}}")
    error = refused("fit", [*flags, *ON, f"--model.architecture={extra}"], capfd)
    assert "model.architecture.scale None, now 2" in error
    ours = [flag for flag in flags if not flag.startswith("--trainer.")]
    export.main(["export", *ours, "--checkpoint=last", f"--output={tmp_path}/out"], OURS)
    pretrained = [*flags, f"--model.pretrained={tmp_path}/out"]
    config = tmp_path / "out" / "config.json"
    original = config.read_text()
    config.write_text(original.replace("10000.0", "500.0"))
    error = refused("fit", [*pretrained, *ON], capfd)
    assert "model.pretrained.rope_parameters.rope_theta 10000.0, now 500.0" in error
    config.write_text(original)
    assert run("fit", *pretrained, *ON) == 0


KEPT = " (no effect: a resume keeps the checkpoint's)"
PRINTED = {
    "--model.optim.learning_rate=0.01": f"model.optim.learning_rate 0.0003 -> 0.01{KEPT}",
    "--model.optim.weight_decay=0.5": f"model.optim.weight_decay 0.1 -> 0.5{KEPT}",
    "--model.optim.betas=[0.5,0.6]": f"model.optim.betas [0.9, 0.95] -> [0.5, 0.6]{KEPT}",
    "--model.optim.schedule=constant": "model.optim.schedule cosine -> constant",
    "--trainer.gradient_clip_val=0.5": "trainer.gradient_clip_val 1.0 -> 0.5",
    "--trainer.precision=bf16-mixed": "trainer.precision 32-true -> bf16-mixed",
}


def test_what_changes_the_updates_is_printed(
    flags: list[str], tmp_path: Path, capfd: CaptureFixture
) -> None:
    def resumed(*change: str) -> list[str]:
        capfd.readouterr()
        assert run("fit", *flags, "--ckpt_path=last", *change) == 0
        lines = capfd.readouterr().out.splitlines()
        return [line for line in lines if " -> " in line and not line.startswith(" ")]

    def group() -> dict[str, Any]:
        return read_full(newest(only_run(tmp_path)))["optimizer_states"][0]["param_groups"][0]

    assert run("fit", *flags) == 0
    before = group()
    assert resumed("--trainer.max_steps=3") == []
    assert sorted(resumed("--trainer.max_steps=4", *PRINTED)) == sorted(PRINTED.values())
    assert group()["betas"] == before["betas"] and group()["weight_decay"] == before["weight_decay"]
    assert manifest.read(newest(only_run(tmp_path)))[KEY]["model.optim.betas"] == [0.9, 0.95]
    sgd = ["--optimizer=torch.optim.SGD", "--optimizer.momentum=0.9"]
    error = refused("fit", [*flags, *ON, *sgd], capfd)
    assert "was trained with optimizer AdamW, now SGD: restore" in error
    assert "accept_changes '[optimizer]'" in error
    sgd += ["--last_checkpoint.accept_changes=[optimizer]"]
    assert "optimizer AdamW -> SGD" in resumed("--trainer.max_steps=9", *sgd)
    assert group()["momentum"] == 0.9
    assert manifest.read(newest(only_run(tmp_path)))[KEY]["optimizer"] == "SGD"
    muon = ["--model.optim.optimizer=muon"]
    assert "optimizer SGD, now Muon: restore" in refused("fit", [*flags, *ON, *muon], capfd)
    muon.append(sgd[-1])
    assert "optimizer SGD -> Muon" in resumed("--trainer.max_steps=11", *muon)
    assert group()["ns_steps"] == 5 and group()["initial_lr"] == before["initial_lr"]
