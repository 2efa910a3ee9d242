"""Training that crashes: what is printed, what is recorded, and the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from dist_template.callbacks import crash as noting
from dist_template.errors import Exit, is_out_of_memory
from dist_template.observe import crash
from dist_template.wings.diagnose import Finding, History, hooks, read_run
from tests.support.injury import Training
from tests.support.runs import OF_ANOTHER_RUN, PACKAGE, PROJECT, Workers, command, only_run, run
from tests.support.tiers import tiers
from tests.support.wings import engine

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.75 GiB."
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"
)


class Breaks(Callback):
    """Raises in the forward pass of the optimizer step after `step`, on `rank` or, with -1, on all."""

    def __init__(self, error: str = "KeyError", message: str = "labels", step: int = 1, rank: int = -1) -> None:
        self.error, self.message, self.step, self.rank = error, message, step, rank

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and self.rank in (-1, trainer.global_rank):
            pl_module.model.register_forward_pre_hook(self.breaks)

    def breaks(self, *_: Any) -> None:
        raise {"KeyError": KeyError, "OutOfMemoryError": torch.OutOfMemoryError}[self.error](self.message)


def broken(flags: list[str], **arguments: Any) -> list[str]:
    given = [f"--trainer.callbacks.{key}={value}" for key, value in arguments.items()]
    return ["fit", *flags, f"--trainer.callbacks+={__name__}.Breaks", *given]


def crashes(folder: Path) -> dict[int, dict[str, Any]]:
    return {crash["rank"]: crash for crash in read_run(folder).crashes}


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIST_RUN_ID", raising=False)
    monkeypatch.delenv("TRACEBACK", raising=False)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError(CUDA), True),
        (RuntimeError(CPU), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("a word on being out of memory"), False),
    ],
)
def test_out_of_memory_errors_are_recognised(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory


def test_a_crash_is_reported_in_a_sentence_and_its_traceback_is_kept(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(broken(flags)) == Exit.FAILED
    printed, folder = capfd.readouterr().err, only_run(tmp_path)
    assert "Traceback" not in printed
    assert "step 2, micro-batch 1, forward" in printed and "KeyError: 'labels'" in printed
    assert "test_crashes.py:" in printed and "in breaks: raise" in printed, "of the user's own files, the last lines"
    assert f"{folder}/crash/rank0.txt" in printed
    text = (folder / "crash" / "rank0.txt").read_text()
    assert text.startswith("Traceback") and "KeyError: 'labels'" in text
    (record,) = read_run(folder).crashes
    assert (record["kind"], record["step"], record["error"]) == ("other", 1, "KeyError")
    assert record["memory"]["used_gib"] >= record["memory"]["outside_gib"] > 0  # a small model fits into freed memory
    (finding,) = [each for each in engine.diagnose(read_run(folder)) if each.rule == "crashed"]
    assert "KeyError: 'labels'" in finding.evidence and finding.steps == (2, 2)

    monkeypatch.setenv("TRACEBACK", "1")
    assert command(broken(flags)) == Exit.FAILED
    assert "Traceback (most recent call last)" in capfd.readouterr().err


def test_out_of_memory_is_reported_with_remedies(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {"error": "OutOfMemoryError", "message": "CUDA out of memory. Tried to allocate 2.00 GiB"}
    assert command(broken(flags, **memory, step=1)) == Exit.FAILED, "a step had fitted: it may be chance"
    printed = capfd.readouterr().err
    assert "Traceback" not in printed and "2 GiB more were requested" in printed
    assert "--data.micro_batch_size 1 " in printed and "now 2, frees" in printed
    assert "8 accumulated instead of 4" in printed and "--model.blocks.checkpointing full" in printed
    (first,) = [each for each in engine.diagnose(read_run(only_run(tmp_path))) if each.rule == "out_of_memory"]
    assert first.level == "error" and first.causes[0].changes[0].to == 1

    assert command(broken([*flags, "--run.name=second"], **memory, step=0)) == Exit.OUT_OF_MEMORY
    assert "optimizer state" not in capfd.readouterr().err, "which the first step would have made"


def test_the_parts_of_a_gpus_memory_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    figures = {"mem_get_info": (1 * gib, 80 * gib), "max_memory_reserved": 77 * gib, "memory_reserved": 76 * gib}
    figures |= {"max_memory_allocated": 70 * gib, "memory_allocated": 40 * gib}
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    memory = noting._memory(torch.device("cuda", 0), None, CUDA)
    assert (memory["total_gib"], memory["asked_gib"], memory["outside_gib"]) == (80.0, 2.0, 3.0)
    assert memory["used_gib"] == 80.0, "77 reserved and 3 outside"
    assert memory["pieces_gib"] == 7.0, "reserved, and held by no tensor"


def test_a_diagnosis_that_fails_leaves_the_traceback(
    flags: list[str], capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> None:
        raise ZeroDivisionError("in the diagnosis")

    monkeypatch.setattr(crash, "sentence", fails)
    assert command(broken(flags)) == Exit.FAILED
    printed = capfd.readouterr().err
    assert "Traceback" in printed and "KeyError: 'labels'" in printed and "in the diagnosis" not in printed


def test_ranks_that_crash_alike_are_reported_once_and_others_too(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    def reported(rank: int, message: str, kind: str = "other", attempt: str = "1") -> bool:
        path = tmp_path / "crash" / f"rank{rank}.json"
        path.parent.mkdir(exist_ok=True)
        record = {"rank": rank, "host": "node", "message": message, "kind": kind, "attempt": attempt, "time": 1.0}
        record |= {"error": "ValueError", "step": 3, "first_step": 0, "place": "step 4, forward", "module": ""}
        path.write_text(json.dumps(record | {"own_lines": [], "memory": {}, "phase": "forward"}))
        error = ValueError(message)
        vars(error)[crash.RECORD] = str(path)
        assert crash.print_crash(error) == Exit.FAILED
        return f"rank {rank} on node" in capfd.readouterr().err

    assert reported(1, "row 17 is empty")
    assert not reported(0, "row 3 is empty"), "the same, with other numbers"
    assert reported(2, "another error")
    assert reported(0, "row 3 is empty", attempt="2"), "after a restart"
    assert reported(3, "1 GiB of CUDA memory", "out_of_memory")
    assert not reported(4, "2 GiB of something else", "out_of_memory"), "ranks run out of memory in different places"


def test_an_attempt_after_the_crash_ends_the_finding(tmp_path: Path) -> None:
    record: dict[str, Any] = {
        "rank": 0,
        "kind": "other",
        "error": "KeyError",
        "message": "'x'",
        "time": 1000.0,
        "step": 3,
        "host": "a",
    }
    record |= {"place": "step 4", "module": "", "own_lines": []}
    later = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(2000))}
    assert [f.rule for f in engine.diagnose(History(tmp_path, crashes=[record]))] == ["crashed"]
    assert engine.diagnose(History(tmp_path, crashes=[record], environment=later)) == []


@pytest.mark.slow
@pytest.mark.parametrize("broken_rank", [0, 1])
def test_each_rank_records_its_own_error(flags: list[str], tmp_path: Path, broken_rank: int) -> None:
    run("prepare", *flags)
    flags = [*flags, "--trainer.devices=2", "--trainer.strategy=ddp"]
    with Workers(2) as workers:
        record = workers.run(["fit", *flags], tmp_path / "record", callbacks=[Breaks(rank=broken_rank)])
    assert record.failed_rank == broken_rank and "KeyError" in record.error
    found = crashes(record.run)
    assert found[broken_rank]["kind"] == "other" and found[broken_rank]["place"] == "step 2, micro-batch 1, forward"
    assert found[1 - broken_rank]["kind"] == "peer", found[1 - broken_rank]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", tiers([1, -1], daily=[1]))
def test_two_processes_report_a_crash_once(flags: list[str], tmp_path: Path, rank: int) -> None:
    """As a user starts them; with -1 both crash."""
    run("prepare", *flags)
    flags = [*flags, "--trainer.devices=2", "--trainer.strategy=ddp"]
    environment = {key: value for key, value in os.environ.items() if key not in OF_ANOTHER_RUN}
    argv = [sys.executable, "-m", PACKAGE, *broken(flags, rank=rank)]
    ended = subprocess.run(argv, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=120)
    printed = ended.stdout + ended.stderr
    assert ended.returncode == Exit.FAILED
    assert printed.count("KeyError: 'labels'") == 1 and "Traceback" not in printed, printed
    assert "training crashed" not in printed, "as a finding too"
    assert printed.count("the traceback is in") == 1
    assert set(crashes(only_run(tmp_path))) == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", tiers([1, 2], daily=[1]))
def test_the_launcher_restarts_only_if_a_step_had_fitted(flags: list[str], tmp_path: Path, ranks: int) -> None:
    """The last of the ranks has no memory. How several end together: the test above, and cluster/test_exit_codes.py."""
    run("prepare", *flags)
    last = ranks - 1
    memory = {"error": "OutOfMemoryError", "message": "'Tried to allocate 2.00 GiB'", "rank": last}
    for step, code, starts in ((0, Exit.OUT_OF_MEMORY, 1), (1, Exit.FAILED, 2)):
        argv = broken([*flags, "--trainer.strategy=ddp"], **memory, step=step)
        with Training(tmp_path / f"at{step}", argv, NPROC=str(ranks), MAX_RESTARTS="1") as training:
            assert training.end() == code, training.log.read_text()
        printed = training.log.read_text()
        assert printed.count("ERROR    out of memory") == starts and "Traceback" not in printed, printed
        folder = tmp_path / "runs" / "default" / f"at{step}" / "crash"
        assert len(list(folder.glob(f"rank{last}*.json"))) == starts, "of the attempt before, too"


UNDER_A_LIMIT = """
import resource, sys
import psutil
from tests.support.line import command
from dist_template.callbacks.record import Record
writes = Record.on_fit_start
def limit(self, trainer, module):
    writes(self, trainer, module)
    most = psutil.Process().memory_info().vms + int(float(sys.argv[1]) * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
Record.on_fit_start = limit
sys.exit(command(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_the_first_remedy_for_a_real_out_of_memory_works(flags: list[str], tmp_path: Path) -> None:
    run("prepare", *flags)
    wide = (
        "{model_type: llama, hidden_size: 256, intermediate_size: 1024, num_hidden_layers: 6, num_attention_heads: 4}"
    )
    flags = [*flags, f"--model.architecture={wide}", "--data.seq_len=64", "--data.micro_batch_size=64"]
    flags += ["--data.global_batch_size=64", "--trainer.max_steps=2", "--trainer.num_sanity_val_steps=0"]
    flags += ["--trainer.limit_val_batches=0"]
    run("prepare", *flags)

    def train(*more: str) -> subprocess.CompletedProcess:
        argv = [sys.executable, "-c", UNDER_A_LIMIT, "0.6", "fit", *flags, *more]
        environment = {key: value for key, value in os.environ.items() if key not in OF_ANOTHER_RUN}
        # The limit is one of addresses: without these each thread reserves some tens of MiB that nothing uses.
        environment |= {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        return subprocess.run(argv, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=200)

    ended = train()
    assert ended.returncode == Exit.OUT_OF_MEMORY, ended.stderr
    assert "Used by: " in ended.stderr and "Traceback" not in ended.stderr
    (finding,) = [each for each in engine.diagnose(read_run(only_run(tmp_path))) if each.rule == "out_of_memory"]
    (change,) = finding.causes[0].changes
    to: Any = change.to
    assert change.key == "data.micro_batch_size" and 64 % to == 0
    helped = train("--run.name=helped", f"--{change.key}={change.to}")
    assert helped.returncode == Exit.DONE, f"with {change}: {helped.stderr}"


@pytest.mark.parametrize("kind", ["other", "out_of_memory"])
def test_only_findings_about_memory_follow_a_crash(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "run" / "crash" / "rank0.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"kind": kind}))
    error = KeyError("x")
    vars(error)[crash.RECORD] = str(record)
    found = [Finding(rule, "error", "certain", f"title of {rule}", "") for rule in ("memory_grows", "slow_rank")]
    monkeypatch.setattr(engine, "diagnose", lambda history: found)
    text = hooks.on_crash(error) or ""
    assert "slow_rank" not in text and ("title of memory_grows" in text) == (kind == "out_of_memory")
