"""Diagnosis during training: each finding once, on one rank, with nothing read from the device."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer_dev.module import LanguageModule

from dist_template.wings.diagnose import Finding
from dist_template.wings.diagnose import callback as diagnosis
from tests.support.library import read_lines
from tests.support.runs import logged, only_run, run

LOW = ["--model.optim.learning_rate=1e-7", "--trainer.limit_val_batches=0", "--diagnosis.every_s=0"]


def test_a_finding_is_printed_once_and_written_once(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fit", *flags, *LOW, "--trainer.max_steps=60") == 0
    out, folder = capsys.readouterr().out, only_run(tmp_path)
    assert out.count("diagnosis: error: the loss does not decrease") == 1
    assert f"diagnose {folder}" in out
    lines = read_lines(folder / diagnosis.FILE)
    assert [line["rule"] for line in lines].count("loss_not_decreasing") == 1
    found = next(line for line in lines if line["rule"] == "loss_not_decreasing")
    assert (
        found["step"] < 60
        and found["causes"][0]["changes"][0]["key"] == "model.optim.learning_rate"
    )
    errors = logged(folder, "health/errors")
    assert errors[2] == 0 and errors[60] == 1


def test_it_diagnoses_again_when_training_fails(
    flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = LanguageModule.training_step
    monkeypatch.setattr(LanguageModule, "training_step", lambda *given: original(*given) * math.nan)
    assert run("fit", *flags) == 65
    assert "diagnosis: error: the loss or the gradient is not finite" in capsys.readouterr().out
    assert read_lines(only_run(tmp_path) / diagnosis.FILE)[0]["rule"] == "loss_not_finite"


def test_other_ranks_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero_only.rank", 1)
    callback = diagnosis.Diagnosis(every_s=0, folder=str(tmp_path / "nowhere"))
    trainer: Any = SimpleNamespace(
        is_global_zero=False, sanity_checking=False, global_step=5, callbacks=[]
    )
    module: Any = SimpleNamespace(metrics=None, eval_metrics={})
    callback.on_train_start(trainer, module)
    callback.on_log_step(trainer, module, {"train/loss": 1.0})
    callback.on_validation_end(trainer, module)
    callback.on_train_end(trainer, module)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_it_reads_nothing_from_the_device(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    for name in ("item", "tolist", "__float__", "__bool__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda tensor, original=original: reads.append("") or original(tensor),
        )
    counts = []
    for enabled in ("false", "true"):
        reads.clear()
        assert run("fit", *flags, *LOW, f"--diagnosis.enabled={enabled}") == 0
        counts.append(len(reads))
    assert counts[0] == counts[1]


def test_a_full_disk_does_not_end_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = diagnosis.Diagnosis(folder=str(tmp_path / "gone"))
    callback._write(Finding("r", "error", "certain", "t", "e"), 3)
    assert "findings.jsonl" in capsys.readouterr().out


@pytest.mark.slow
def test_a_folder_that_cannot_be_read_does_not_end_training(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh, calls = diagnosis.History.refresh, list[Any]()

    def stutter(history: Any) -> None:
        calls.append(history)
        if len(calls) == 2:  # the first reads what earlier attempts wrote
            raise OSError("Stale file handle")
        refresh(history)

    monkeypatch.setattr(diagnosis.History, "refresh", stutter)
    assert run("fit", *flags, *LOW, "--trainer.max_steps=60") == 0
    out = capsys.readouterr().out
    assert "Stale file handle; training continues" in out and "the loss does not decrease" in out


def test_a_line_of_findings_is_complete(tmp_path: Path) -> None:
    diagnosis.Diagnosis(folder=str(tmp_path))._write(
        Finding("r", "error", "certain", "t", "e", steps=(1, 2), ranks=[3]), 3
    )
    line = json.loads((tmp_path / diagnosis.FILE).read_text())
    assert (
        line["step"] == 3
        and line["steps"] == [1, 2]
        and line["ranks"] == [3]
        and line["confidence"] == "certain"
    )
