"""Training that crashes: what is printed, what is recorded, and the exit code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from dist_template.errors import DECIDED, Exit
from dist_template.wings.diagnose import read_run
from tests.support.runs import command, only_run, run, run_in_subprocess
from tests.support.wings import engine

ERRORS = {"KeyError": KeyError, "OutOfMemoryError": torch.OutOfMemoryError}


class Breaks(Callback):
    """Raises in the forward pass of the step after `step`, on `rank` or, with -1, on all."""

    def __init__(
        self, error: str = "KeyError", message: str = "labels", step: int = 1, rank: int = -1
    ) -> None:
        self.error, self.message, self.step, self.rank = error, message, step, rank

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step and self.rank in (-1, trainer.global_rank):
            pl_module.model.register_forward_pre_hook(self.breaks)

    def breaks(self, *_: Any) -> None:
        raise ERRORS[self.error](self.message)


def broken(flags: list[str], **arguments: Any) -> list[str]:
    given = [f"--trainer.callbacks.{key}={value}" for key, value in arguments.items()]
    return ["fit", *flags, f"--trainer.callbacks+={__name__}.Breaks", *given]


def test_a_crash_is_a_sentence_and_a_kept_traceback(flags: Any, tmp_path: Path, capfd: Any) -> None:
    assert command(broken([*flags, "--run.report=true"])) == Exit.FAILED
    printed, folder = capfd.readouterr().err, only_run(tmp_path)
    assert "Traceback" not in printed
    assert "step 2, micro-batch 1, forward" in printed and "KeyError: 'labels'" in printed
    assert "test_crashes.py:" in printed and "in breaks: raise" in printed
    assert f"{folder}/crash/rank0.txt" in printed
    text = (folder / "crash" / "rank0.txt").read_text()
    assert text.startswith("Traceback") and "KeyError: 'labels'" in text
    (record,) = read_run(folder).crashes
    assert (record["kind"], record["step"], record["error"]) == ("other", 1, "KeyError")
    assert record["memory"]["used_gib"] >= record["memory"]["outside_gib"] > 0
    (finding,) = [each for each in engine.diagnose(read_run(folder)) if each.rule == "crashed"]
    assert "KeyError: 'labels'" in finding.evidence and finding.steps == (2, 2)
    report = (folder / "report.html").read_text("utf-8")
    assert "step 1 of 20" in report and "training crashed: KeyError" in report


@pytest.mark.slow
def test_out_of_memory_has_cures(flags: Any, tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    message = "CUDA out of memory. Tried to allocate 2.00 GiB"
    memory = {"error": "OutOfMemoryError", "message": message}
    assert command(broken(flags, **memory)) == Exit.FAILED
    printed = capfd.readouterr().err
    assert "Traceback" not in printed and "2 GiB more were requested" in printed
    assert "--data.micro_batch_size 1 " in printed and "now 2, frees" in printed
    assert "8 accumulated instead of 4" in printed
    assert "--model.blocks.checkpointing full" in printed
    findings = engine.diagnose(read_run(only_run(tmp_path)))
    (first,) = [each for each in findings if each.rule == "out_of_memory"]
    assert first.level == "error" and first.causes[0].changes[0].to == 1

    monkeypatch.setenv("TRACEBACK", "1")
    assert command(broken([*flags, "--run.name=second"], **memory, step=0)) == Exit.OUT_OF_MEMORY
    printed = capfd.readouterr().err
    assert "optimizer state" not in printed, "which the first step would have made"
    assert "Traceback (most recent call last)" in printed
    assert Exit.OUT_OF_MEMORY in DECIDED, "a launcher does not restart it"


@pytest.mark.slow
def test_two_processes_report_a_crash_of_one_once(flags: list[str], tmp_path: Path) -> None:
    """As a user starts them."""
    run("prepare", *flags)
    two = ["--trainer.devices=2", "--trainer.strategy=ddp"]
    ended = run_in_subprocess(*broken([*flags, *two], rank=1))
    printed = ended.stdout + ended.stderr
    assert ended.returncode == Exit.FAILED
    assert printed.count("KeyError: 'labels'") == 1 and "Traceback" not in printed, printed
    assert "training crashed" not in printed, "as a finding too"
    assert printed.count("the traceback is in") == 1
    assert {crash["rank"] for crash in read_run(only_run(tmp_path)).crashes} == {0, 1}
