"""Run folders, loggers and the verbs after training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from trainer_dev.module import LanguageModule

from tests.support.runs import logged, only_run, run


def test_a_run_records_what_ran_and_where(flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert run("fit", *flags) == 0
    folder = only_run(tmp_path)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["data"]["seq_len"] == 32 and config["last_checkpoint"]["dirpath"] == "{run}/checkpoints"
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__ and environment["command"]
    assert (folder / "samples.txt").read_text().startswith("--- step 10")
    assert list(folder.glob("events.*")), "TensorBoard names it by this folder"
    assert not (folder / "hparams.yaml").exists(), "config.yaml has all of it"

    shown = capfd.readouterr().out
    assert str(folder) in shown
    assert "eval/bits_per_byte" in shown and "unigram" in shown
    assert "\r" not in shown, "a log file gets lines"
    learned = logged(folder, "eval/bits_per_byte")
    assert learned[20] < learned[0]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_samples_are_generated_in_the_trainings_precision(
    flags: list[str], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(LanguageModule, "generate", lambda self, ids: found.append(_precision()) or ids)
    assert run("fit", *flags, f"--trainer.precision={precision}", "--trainer.max_steps=2") == 0
    assert found == [(True, torch.float32) if precision == "bf16-mixed" else (False, torch.bfloat16)]


def _precision() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_default_dtype()


@pytest.mark.slow
def test_the_recorded_configuration_runs_again_as_another_run(flags: list[str], tmp_path: Path) -> None:
    assert run("fit", *flags) == 0
    folder = only_run(tmp_path)
    before = sorted((folder / "checkpoints").iterdir())
    again = [f"--config={folder}/config.yaml", "--run.name=again", "--trainer.max_steps=2"]
    assert run("fit", *again) == 0
    assert sorted((folder / "checkpoints").iterdir()) == before
    other = only_run(tmp_path, "again")
    assert [path.name for path in (other / "checkpoints").glob("step*")] == ["step00000002.ckpt"]


def test_a_second_run_never_collides_and_a_resumed_one_keeps_its_folder(flags: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        assert run("fit", *flags, "--trainer.max_steps=2") == 0
    assert len(list((tmp_path / "runs/default").iterdir())) == 2
    assert run("fit", *flags, "--ckpt_path=last", "--trainer.max_steps=4") == 0
    folders = list((tmp_path / "runs/default").iterdir())
    assert len(folders) == 2
    (resumed,) = [folder for folder in folders if (folder / "config.0.yaml").exists()]
    assert set(logged(resumed, "train/loss")) == {1, 2, 3, 4}


def test_validate_test_and_predict_use_the_checkpoint(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert run("fit", *flags) == 0
    folder = only_run(tmp_path)
    trained = logged(folder, "eval/loss")[20]
    capfd.readouterr()
    assert run("validate", *flags, "--ckpt_path=last") == 0
    assert f"loss {trained:.4f}" in capfd.readouterr().out
    assert run("test", *flags, "--ckpt_path=last") == 0
    assert "bits_per_byte" in capfd.readouterr().out
    assert run("predict", *flags, "--ckpt_path=last", "--data.prompts=[the quick]") == 0
    (prediction,) = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    assert prediction["prompt"] == "the quick" and prediction["continuation"]


@pytest.mark.slow
def test_an_evaluation_without_ckpt_path_takes_the_newest_runs_best_or_else_last_checkpoint(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert run("test", *flags) == 2
    assert "there is no checkpoint under" in capfd.readouterr().err
    assert run("fit", *flags, "--trainer.max_steps=2", "--trainer.val_check_interval=1") == 0
    best = only_run(tmp_path) / "checkpoints" / "best-step00000002.ckpt"
    trained = logged(only_run(tmp_path), "eval/loss")[2]
    capfd.readouterr()
    for given in ([], ["--ckpt_path=best"]):
        assert run("validate", *flags, *given) == 0
        shown = capfd.readouterr().out
        assert f"validate: the weights come from {best}" in shown and f"loss {trained:.4f}" in shown
    shutil.rmtree(best)
    assert run("validate", *flags) == 0
    shown = capfd.readouterr().out
    assert f"validate: the weights come from {best.parent}\n" in shown and f"loss {trained:.4f}" in shown
    assert run("validate", *flags, "--ckpt_path=best") == 2
    assert "has no best-*.ckpt: give `last`" in capfd.readouterr().err
    assert only_run(tmp_path), "they write into the run's folder"


def test_best_and_last_checkpoints_are_kept(flags: list[str], tmp_path: Path) -> None:
    assert run("fit", *flags) == 0
    names = sorted(path.name for path in (only_run(tmp_path) / "checkpoints").iterdir())
    assert names == ["best-step00000020.ckpt", "step00000020.ckpt"]


@pytest.mark.slow
@pytest.mark.parametrize("every", [5, 2])  # optimizer steps of 4 micro-batches each
def test_plateau_lowers_the_learning_rate_after_a_validation_without_improvement(
    flags: list[str], tmp_path: Path, every: int
) -> None:
    plateau = ["--model.optim.schedule=reduce_on_plateau", "--model.optim.plateau_patience=0"]
    slow = ["--model.optim.learning_rate=1e-6", f"--trainer.val_check_interval={every}"]  # too slow to improve
    assert run("fit", *flags, *plateau, *slow) == 0
    rates = logged(only_run(tmp_path), "train/learning_rate")
    # The first validation sets the mark; the second and the third halve the rate of the steps after them.
    expected = {1: 1e-6, 2 * every: 1e-6, 2 * every + 1: 5e-7, 3 * every: 5e-7, 3 * every + 1: 2.5e-7}
    assert {step: rates[step] for step in expected} == pytest.approx(expected)


@pytest.mark.slow
def test_early_stopping_by_its_preset(flags: list[str], tmp_path: Path) -> None:
    flags = [*flags, "--config=preset/early_stopping", "--model.optim.learning_rate=1e-9"]
    assert run("fit", *flags, "--trainer.val_check_interval=2") == 0
    # patience 3: the validation at step 2 sets the mark, those at 4, 6 and 8 do not beat it
    assert max(logged(only_run(tmp_path), "train/loss")) == 8
