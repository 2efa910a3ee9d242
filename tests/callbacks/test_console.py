"""The lines of progress of any module."""

from types import SimpleNamespace
from typing import Any

import pytest

from dist_template.callbacks.console import Console, of_progress_bar, shown_metrics, total_steps

INF = float("inf")


def trainer(total: float, max_steps: int = -1, shown: dict[str, float] | None = None) -> Any:
    return SimpleNamespace(
        estimated_stepping_batches=total,
        max_steps=max_steps,
        progress_bar_metrics=shown or {},
        global_step=4,
    )


def module(is_automatic: bool = True) -> Any:
    return SimpleNamespace(automatic_optimization=is_automatic)


@pytest.mark.parametrize("total", [INF, -1, 0])  # -1: a loader without a length, and no max_steps
def test_a_training_without_an_end_has_no_time_left(total: float, capsys: Any) -> None:
    console = Console(line_every_s=0)
    console.on_train_start(trainer(total), module())
    console._first_step = 0
    console.on_log_step(trainer(total), module(), {"train/loss": 1.0})
    assert capsys.readouterr().out == "step 4  loss 1.000\n"


def test_steps_of_several_optimizers_are_not_compared_with_batches() -> None:
    """Each optimizer's steps count: 24 batches in which two optimizers step are 48 steps."""
    manual, batches = module(is_automatic=False), SimpleNamespace(total=SimpleNamespace(ready=2))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=batches))
    known = trainer(24)  # in its second batch of eight, and in the fourth step
    vars(known).update(max_epochs=3, num_training_batches=8, fit_loop=loop)
    assert total_steps(known, manual) == 48
    endless = trainer(24)
    vars(endless).update(max_epochs=-1, num_training_batches=INF)
    assert total_steps(endless, manual) is None
    endless.max_steps = 24
    assert total_steps(endless, manual) == 24
    assert total_steps(known, module()) == 24


def test_a_line_has_what_the_module_shows_in_its_progress_bar() -> None:
    shown = {"train_loss_step": 1.0, "train_loss": 1.0, "d_loss": 2.0, "acc_step": 0.5}
    shown |= {"acc_epoch": 0.4, "val_loss": 3.0, "train/mae": 4.0}
    found = of_progress_bar(trainer(9, shown=shown), {"train/loss": 1.0})
    assert found == {"d_loss": 2.0, "acc": 0.5, "train/mae": 4.0}
    many = {f"m{number}": 0.0 for number in range(50)}
    assert len(of_progress_bar(trainer(9, shown=many), {})) == 6


def test_results_have_short_names_where_they_are_unique() -> None:
    metrics = {"val/loss": 1.0, "val/a/iou": 0.1, "val/b/iou": 0.2, "acc/val": 0.3}
    metrics |= {"val_loss/dataloader_idx_1": 4.0}
    expected = ["loss 1.0000", "val/a/iou 0.1000", "val/b/iou 0.2000", "acc/val 0.3000"]
    assert shown_metrics(metrics, 9) == [*expected, "val_loss/dataloader_idx_1 4.0000"]
    assert shown_metrics(metrics, 1) == ["loss 1.0000", "and 4 more"]
