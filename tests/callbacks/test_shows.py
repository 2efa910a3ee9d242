"""Errors in what only shows something end no training; `predict` refuses; the console's line."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from trainer_dev.module import LanguageModule

from dist_template.callbacks import Console
from dist_template.callbacks.console import only_shows
from dist_template.callbacks.samples import Samples
from dist_template.callbacks.summary import Summary
from dist_template.wings.diagnose.callback import Diagnosis
from tests.support.runs import logged, newest, only_run, run


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
    "train/loss": 2.345678, "train/grad_norm": 1.5, "train/learning_rate": 3e-4,
    "perf/tokens_per_s": 123456.0, "perf/mfu": 0.42, "perf/data_wait_share": 0.01,
    "health/errors": 0.0,
}  # fmt: skip
PARTS = ("step 40/1000", "loss 2.346", "lr 3.00e-04", "123,456 tok/s", "mfu 42%", "eta ", "  ok\n")


def shown(monkeypatch: Any, columns: int = 0) -> str:
    """What a log step prints on a terminal that wide; 0: no terminal."""
    monkeypatch.setattr("sys.stdout", screen := io.StringIO())
    monkeypatch.setattr(screen, "isatty", lambda: bool(columns))
    monkeypatch.setenv("COLUMNS", str(columns or 80))
    console = Console()
    console._first_step = 30
    trainer: Any = SimpleNamespace(global_step=40, estimated_stepping_batches=1000)
    console.on_log_step(trainer, None, dict(METRICS))
    return screen.getvalue()


def test_a_log_step_is_one_line_that_a_terminal_never_wraps(monkeypatch: Any) -> None:
    line = shown(monkeypatch)
    assert "\r" not in line and "\x1b" not in line and line.endswith("\n") and line.count("\n") == 1
    assert all(part in line for part in PARTS), line
    for columns in (200, 100, 80, 60, 40, 20, 8):
        line = shown(monkeypatch, columns).removeprefix("\r\x1b[K")
        assert "\n" not in line and len(line) < columns, columns
    assert "loss" in shown(monkeypatch, 40) and "mfu" not in shown(monkeypatch, 40)
