"""Diagnosis during training: each finding once, with nothing read from the device."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_dev.module import LanguageModule

from dist_template.wings.diagnose import callback as diagnosis
from tests.support.library import read_lines
from tests.support.runs import logged, only_run, run

LOW = ["--model.optim.learning_rate=1e-7", "--trainer.limit_val_batches=0", "--diagnosis.every_s=0"]


def test_a_finding_is_once_printed_and_written_and_reading_errors_pass(
    flags: list[str], tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    refresh, calls = diagnosis.History.refresh, list[Any]()

    def stutter(history: Any) -> None:
        calls.append(history)
        if len(calls) == 2:  # the first reads what earlier attempts wrote
            raise OSError("Stale file handle")
        refresh(history)

    monkeypatch.setattr(diagnosis.History, "refresh", stutter)
    assert run("fit", *flags, *LOW, "--trainer.max_steps=60") == 0
    out, folder = capsys.readouterr().out, only_run(tmp_path)
    assert "Stale file handle; training continues" in out
    assert out.count("diagnosis: error: the loss does not decrease") == 1
    assert f"diagnose {folder}" in out
    lines = read_lines(folder / diagnosis.FILE)
    (found,) = (line for line in lines if line["rule"] == "loss_not_decreasing")
    assert found["step"] < 60
    assert found["causes"][0]["changes"][0]["key"] == "model.optim.learning_rate"
    errors = logged(folder, "health/errors")
    assert errors[2] == 0 and errors[60] == 1


def test_it_diagnoses_again_when_training_fails(
    flags: list[str], tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    original = LanguageModule.training_step
    monkeypatch.setattr(LanguageModule, "training_step", lambda *given: original(*given) * math.nan)
    assert run("fit", *flags) == 65
    printed = capsys.readouterr().out
    assert "diagnosis: error: the loss or the gradient is not finite" in printed
    assert read_lines(only_run(tmp_path) / diagnosis.FILE)[0]["rule"] == "loss_not_finite"


@pytest.mark.slow
def test_it_reads_nothing_from_the_device(flags: list[str], monkeypatch: Any) -> None:
    reads: list[str] = []
    for name in ("item", "tolist", "__float__", "__bool__"):
        original: Any = getattr(torch.Tensor, name)

        def noted(tensor: Any, original: Any = original) -> Any:
            reads.append("")
            return original(tensor)

        monkeypatch.setattr(torch.Tensor, name, noted)
    counts = []
    for enabled in ("false", "true"):
        reads.clear()
        assert run("fit", *flags, *LOW, f"--diagnosis.enabled={enabled}") == 0
        counts.append(len(reads))
    assert counts[0] == counts[1]
