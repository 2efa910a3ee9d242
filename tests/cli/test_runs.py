"""Run folders, loggers and the verbs after training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.runs import logged, only_run, run


def test_a_run_records_what_ran_and_where(flags: list[str], tmp_path: Path, capfd: Any) -> None:
    assert run("fit", *flags) == 0
    folder = only_run(tmp_path)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["data"]["seq_len"] == 32
    assert config["last_checkpoint"]["dirpath"] == "{run}/checkpoints"
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__ and environment["command"]
    assert (folder / "samples.txt").read_text().startswith("--- step 10")
    assert list(folder.glob("events.*")), "TensorBoard names it by this folder"
    assert not (folder / "hparams.yaml").exists(), "config.yaml has all of it"
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["best-step00000020.ckpt", "step00000020.ckpt"]

    shown = capfd.readouterr().out
    assert str(folder) in shown
    assert "eval/bits_per_byte" in shown and "unigram" in shown
    assert "\r" not in shown, "a log file gets lines"
    learned = logged(folder, "eval/bits_per_byte")
    assert learned[20] < learned[0]


def test_test_and_predict_use_the_checkpoint(flags: list[str], tmp_path: Path, capfd: Any) -> None:
    assert run("fit", *flags, "--trainer.max_steps=10") == 0
    folder = only_run(tmp_path)
    capfd.readouterr()
    assert run("test", *flags, "--ckpt_path=last") == 0
    assert "bits_per_byte" in capfd.readouterr().out
    assert run("predict", *flags, "--ckpt_path=last", "--data.prompts=[the quick]") == 0
    (prediction,) = map(json.loads, (folder / "predictions.jsonl").read_text().splitlines())
    assert prediction["prompt"] == "the quick" and prediction["continuation"]


@pytest.mark.slow
def test_an_evaluation_takes_the_newest_runs_best(flags: Any, tmp_path: Path, capfd: Any) -> None:
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
    assert f"validate: the weights come from {best.parent}\n" in shown
    assert f"loss {trained:.4f}" in shown
    assert run("validate", *flags, "--ckpt_path=best") == 2
    assert "has no best-*.ckpt: give `last`" in capfd.readouterr().err
    assert only_run(tmp_path), "they write into the run's folder"


@pytest.mark.slow
def test_plateau_lowers_the_learning_rate(flags: list[str], tmp_path: Path) -> None:
    every = 5  # optimizer steps of 4 micro-batches each
    plateau = ["--model.optim.schedule=reduce_on_plateau", "--model.optim.plateau_patience=0"]
    slow = ["--model.optim.learning_rate=1e-6", f"--trainer.val_check_interval={every}"]
    assert run("fit", *flags, *plateau, *slow) == 0
    rates = logged(only_run(tmp_path), "train/learning_rate")
    # The first validation sets the mark; the second and the third halve the rate after them.
    expected = {1: 1e-6, 10: 1e-6, 11: 5e-7, 15: 5e-7, 16: 2.5e-7}
    assert {step: rates[step] for step in expected} == pytest.approx(expected)
