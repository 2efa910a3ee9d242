"""Flags that guides on training give: clipping by value, torch's schedules, early stopping."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.runs import logged, only_run, run

pytestmark = pytest.mark.slow
SGD = ["--optimizer=torch.optim.SGD", "--model.optim.learning_rate=0.5"]


def test_gradients_are_clipped_by_value(flags: list[str], monkeypatch: Any) -> None:
    largest: list[float] = []
    step = torch.optim.SGD.step

    def recorded(self: torch.optim.SGD, closure: Any = None) -> Any:
        loss = step(self, closure)  # Lightning's closure computes the gradients, and clips them
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        largest.append(max(float(g.abs().max()) for g in gradients if g is not None))
        return loss

    monkeypatch.setattr(torch.optim.SGD, "step", recorded)
    more = ["--trainer.max_steps=3", "--trainer.limit_val_batches=0"]
    clip = ["--trainer.gradient_clip_val=0.001", "--trainer.gradient_clip_algorithm=value"]
    assert run("fit", *flags, *SGD, *more, *clip) == 0
    assert largest == pytest.approx([0.001] * 3, rel=1e-6)


def test_cosine_annealing_is_torchs(flags: list[str], tmp_path: Path) -> None:
    given = ["--lr_scheduler=CosineAnnealingLR", "--lr_scheduler.T_max=6"]
    more = ["--trainer.max_steps=6", "--trainer.limit_val_batches=0"]
    assert run("fit", *flags, *SGD, *given, *more) == 0
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    expected = []
    for _ in range(6):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    found = logged(only_run(tmp_path), "train/learning_rate")
    assert [*found.values()] == pytest.approx(expected), "stepped after each optimizer step"


def test_the_rate_of_a_step_is_the_one_that_lightnings_monitor_reads(
    flags: list[str], tmp_path: Path, capsys: Any
) -> None:
    """LearningRateMonitor counts completed steps: what it logs at n - 1 made step n. In a warm-up
    every rate differs; the terminal shows the same, and so does a resumed run."""
    more = ["--trainer.callbacks+=LearningRateMonitor", "--model.optim.warmup=4"]
    more += ["--trainer.accumulate_grad_batches=2", "--trainer.limit_val_batches=0"]
    more += ["--console.line_every_s=0"]
    assert run("fit", *flags, *SGD, *more, "--trainer.max_steps=5") == 0
    assert run("fit", *flags, *SGD, *more, "--trainer.max_steps=7", "--ckpt_path=last") == 0
    found = only_run(tmp_path)
    rates, monitored = (logged(found, name) for name in ("train/learning_rate", "lr-SGD/pg1"))
    assert rates == pytest.approx({step + 1: rate for step, rate in monitored.items()}, rel=1e-12)
    assert rates[1] == 0 and len({*rates.values()}) > 4, "the warm-up starts at 0"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    shown = {int(line[5 : line.index("/")]): line.split("  lr ")[1].split()[0] for line in lines}
    assert shown == {step: f"{rate:.2e}" for step, rate in rates.items()}


def test_the_rate_falls_on_a_plateau_as_torchs(flags: list[str], tmp_path: Path) -> None:
    """The rate is so low that eval/loss stays within the threshold of an improvement."""
    given = ["--lr_scheduler=ReduceLROnPlateau", "--lr_scheduler.monitor=eval/loss"]
    given += ["--lr_scheduler.patience=0", "--lr_scheduler.factor=0.5"]
    more = ["--trainer.max_steps=8", "--trainer.val_check_interval=2"]
    assert run("fit", *flags, *SGD, "--model.optim.learning_rate=1e-7", *given, *more) == 0
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1e-7)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    losses = logged(only_run(tmp_path), "eval/loss")
    rates = logged(only_run(tmp_path), "train/learning_rate")
    expected, rate = {}, 1e-7
    for step in range(1, 9):
        expected[step] = rate
        if step in losses:
            schedule.step(losses[step])
            rate = optimizer.param_groups[0]["lr"]
    assert rates == pytest.approx(expected, rel=1e-6) and rates[8] < rates[1]


def test_early_stopping_ends_a_training_that_no_longer_improves(
    flags: list[str], tmp_path: Path, capsys: Any
) -> None:
    more = ["--model.optim.learning_rate=1e-9", "--trainer.val_check_interval=1"]
    assert run("fit", *flags, "--config=preset/early_stopping", *more) == 0
    steps = logged(only_run(tmp_path), "train/loss")
    assert max(steps) <= 4, "three validations in a row without an improvement"
