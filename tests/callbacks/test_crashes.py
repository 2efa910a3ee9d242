"""Training that crashes is explained; a signal, or the end of its time, stops and saves it."""

import io
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from trainer_dev.module import LanguageModule

from dist_template.callbacks import Console
from dist_template.callbacks.console import only_shows
from dist_template.callbacks.preemption import Vote
from dist_template.callbacks.samples import Samples
from dist_template.callbacks.summary import Summary
from dist_template.checkpoint import manifest
from dist_template.errors import DECIDED, Exit
from dist_template.wings.diagnose import engine, read_run
from dist_template.wings.diagnose.callback import Diagnosis
from dist_template.wings.rehearse.compare import first_difference
from dist_template.wings.rehearse.record import RunRecord
from tests.support.runs import command, logged, newest, only_run, run, run_in_subprocess, small
from tests.support.saves import Trainings

ERRORS = {"KeyError": KeyError, "OutOfMemoryError": torch.OutOfMemoryError}


class Breaks(Callback):
    """Raises in the forward pass of the step after `step`, on `rank` or, with -1, on all."""

    def __init__(
        self, error: str = "KeyError", message: str = "labels", step: int = 1, rank: int = -1
    ) -> None:
        self.error, self.message, self.step, self.rank = error, message, step, rank

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
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


class Network(nn.Module):
    """No transformers model: its forward has arguments of its own, and there is no `generate`."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.output = nn.Linear(8, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens)) / self.temperature


def test_generate_is_not_needed(flags: Any, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    forward = lambda self, batch: self.model(batch["input_ids"])  # noqa: E731
    monkeypatch.setattr(LanguageModule, "forward", forward)
    monkeypatch.setattr(LanguageModule, "build_model", lambda _, data: Network(data.vocab_size))
    monkeypatch.setattr(LanguageModule, "build_config", lambda *_: None)
    steps = ["--trainer.max_steps=4", "--trainer.val_check_interval=2", "--model.optim.warmup=0"]
    assert run("fit", *flags, *steps) == 0
    out = capsys.readouterr().out
    sentence = "Network has no generate: write LanguageModule.generate"
    assert out.count(sentence) == 1, "in two validations"
    assert set(logged(only_run(tmp_path), "eval/loss")) == {0, 2, 4}
    assert run("predict", *flags, f"--ckpt_path={newest(only_run(tmp_path))}") == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


SHOWS = {Console: "on_log_step", Diagnosis: "_diagnose", Samples: "on_validation_end"}
SHOWS |= {Summary: "show"}


def test_errors_in_what_shows_end_no_training(flags: Any, monkeypatch: Any, capsys: Any) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted")

    for owner, method in SHOWS.items():
        assert hasattr(getattr(owner, method), "__wrapped__"), "by only_shows"
        monkeypatch.setattr(owner, method, only_shows(broken))
    steps = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--model.optim.warmup=0"]
    assert run("fit", *flags, *steps) == 0
    notes = re.findall(r"note: (\w+): RuntimeError: planted; training", capsys.readouterr().out)
    assert sorted(notes) == ["console", "diagnosis", "samples", "summary"]


METRICS = {
    "train/loss": 2.345678,
    "train/grad_norm": 1.5,
    "train/learning_rate": 3e-4,
    "perf/tokens_per_s": 123456.0,
    "perf/mfu": 0.42,
    "perf/data_wait_share": 0.01,
    "health/errors": 0.0,
}
PARTS = ("step 40/1000", "loss 2.346", "lr 3.00e-04", "123,456 tok/s", "mfu 42%", "eta ", "  ok\n")


def shown(monkeypatch: Any, columns: int = 0) -> str:
    """What a log step prints on a terminal that wide; 0: no terminal."""
    monkeypatch.setattr("sys.stdout", screen := io.StringIO())
    monkeypatch.setattr(screen, "isatty", lambda: bool(columns))
    monkeypatch.setenv("COLUMNS", str(columns or 80))
    console = Console()
    console._first_step = 30
    trainer: Any = SimpleNamespace(
        global_step=40, estimated_stepping_batches=1000, progress_bar_metrics={}
    )
    module: Any = SimpleNamespace(automatic_optimization=True)
    console.on_log_step(trainer, module, dict(METRICS))
    return screen.getvalue()


def test_a_log_step_is_one_line_that_a_terminal_never_wraps(monkeypatch: Any) -> None:
    line = shown(monkeypatch)
    assert "\r" not in line and "\x1b" not in line and line.endswith("\n") and line.count("\n") == 1
    assert all(part in line for part in PARTS), line
    for columns in (200, 100, 80, 60, 40, 20, 8):
        line = shown(monkeypatch, columns).removeprefix("\r\x1b[K")
        assert "\n" not in line and len(line) < columns, columns
    assert "loss" in shown(monkeypatch, 40) and "mfu" not in shown(monkeypatch, 40)


FLAGS = """--data.micro_batch_size=2 --model.optim.learning_rate=0.01
    --lr_scheduler=ReduceLROnPlateau --lr_scheduler.monitor=eval/loss --lr_scheduler.patience=0
    --data.seq_len=8 --last_checkpoint.every_n_steps=5 --trainer.val_check_interval=5""".split()


class Signal(Callback):
    """Sends `number` to its process, or its process group, on `rank`, in a hook at `step`."""

    def __init__(self, rank: int, step: int, number: int, hook: str, send: Callable) -> None:
        self.rank, self.step, self.number, self.send = rank, step, number, send
        vars(self)[hook] = self._send
        self._sent = False

    def _send(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        due = trainer.global_step >= self.step and not trainer.sanity_checking and not self._sent
        if due and trainer.global_rank == self.rank:
            self._sent = True
            self.send(os.getpid(), self.number)  # before the hook returns: the next vote has it


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Trainings:
    folder = tmp_path_factory.mktemp("preemption")
    return Trainings(folder, [*small(corpus, cache, folder), *FLAGS])


@pytest.fixture(scope="module")
def whole(train: Trainings) -> RunRecord:
    """The run that is never stopped."""
    return train("whole", "ddp").check()


def stopped(record: RunRecord, by: str) -> int:
    """After which step all ranks stopped together and saved; 0 if they did not."""
    sentence = re.escape(f"Ended: {by}: stopped and saved after step ") + r"(\d+)"
    found = [re.match(sentence, answer) for answer in record.answers.values()]
    steps = {each and int(each[1]) for each in found}
    return steps.pop() or 0 if len(steps) == 1 else 0


@pytest.mark.slow
def test_a_signal_to_a_rank_stops_all_and_loses_no_step(train: Trainings, whole: RunRecord) -> None:
    """Its data workers are not killed: they are in a process group of their own."""
    signal_at = Signal(1, 7, signal.SIGTERM, "on_train_batch_start", os.killpg)
    options: Any = {"callbacks": [signal_at], "prelude": os.setpgrp}
    first = train("trained", "ddp", "--data.num_workers=2", **options)
    last = stopped(first, "SIGTERM")
    assert 7 < last < 20, first.answers
    checkpoints = first.run / "checkpoints"
    assert manifest.newest(checkpoints) == checkpoints / manifest.name(last)
    second = train("trained", "ddp").check()
    assert min(second.rows()) == last + 1
    assert first_difference(second.end, whole.end) == ""


@pytest.mark.slow
def test_an_interrupted_validation_is_repeated(train: Trainings, whole: RunRecord) -> None:
    """Its step may be saved already; the learning rate depends on its result."""
    signal_at = Signal(0, 10, signal.SIGUSR1, "on_validation_batch_start", os.kill)
    first = train("validated", "ddp", callbacks=[signal_at])
    assert stopped(first, "SIGUSR1") == 10 and 10 not in first.eval(), first.answers
    second = train("validated", "ddp").check()
    expected = whole.eval()
    assert second.eval() == {step: expected[step] for step in expected if step >= 10}
    rates, expected = (each.metric("train/learning_rate") for each in (second, whole))
    assert rates == {step: rate for step, rate in expected.items() if step > 10}
    assert first_difference(second.end, whole.end) == ""


@pytest.mark.slow
def test_the_time_limit_stops_all_ranks(train: Trainings) -> None:
    limits = ["--preemption.max_time=00:00:00:03", "--trainer.max_steps=100000"]
    record = train("timed", "ddp", *limits)
    assert stopped(record, "preemption.max_time 00:00:00:03 is up"), record.answers


def each_for_itself() -> None:
    """The fault that the vote is against."""
    Vote.cast = lambda self, numbers: list(numbers)


@pytest.mark.slow
def test_without_the_vote_a_signal_to_one_rank_breaks_the_run(train: Trainings) -> None:
    signal_at = Signal(1, 7, signal.SIGTERM, "on_train_batch_start", os.kill)
    record = train("red", "ddp", callbacks=[signal_at], prelude=each_for_itself, timeout_s=12)
    assert not record.ok and not stopped(record, "SIGTERM"), record.answers
