"""`fit` as shipped: every callback, the console, TensorBoard and the run's own log."""

import contextlib
import os
from collections.abc import Generator
from typing import Any
from unittest.mock import patch

import lightning as L
from lightning.pytorch import Callback
from torch import Tensor
from trainer_dev.module import LanguageModule

import dist_template.cli.fit as cli
from dist_template.compat.lightning import accumulates
from tests.support.line import OURS

from .. import ROOT
from ..arms import Sample
from .stopwatch import Stopwatch
from .task import Task, data_flags, loss_of, place_in_world

CONFIGS = ROOT / "build" / "dev" / "configs"


class Timer(Callback):
    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if not accumulates(trainer):
            self.stopwatch.tick(trainer.global_step)


def train(task: Task) -> Sample:
    stopwatch = Stopwatch(task)

    class Timed(cli.CLI):
        def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
            trainer = super().instantiate_trainer(**kwargs)
            trainer.callbacks.append(Timer(stopwatch))  # ty: ignore[missing-attribute]
            return trainer

    with edited(task):
        Timed(OURS, ["fit", *flags(task, place_in_world()[1])], run=True)
    return stopwatch.sample


def flags(task: Task, ranks: int) -> list[str]:
    strategy = (
        [] if task.strategy == "auto" else [f"--config={CONFIGS / 'strategy' / task.strategy}.yaml"]
    )
    return [
        *strategy,
        *data_flags(task, ranks),
        f"--run.root={task.folder / 'runs'}",
        "--run.report=false",
        f"--trainer.accelerator={'gpu' if task.device == 'cuda' else 'cpu'}",
        f"--trainer.devices={ranks}",
        f"--trainer.precision={task.precision}",
        f"--trainer.max_steps={task.steps}",
        f"--trainer.log_every_n_steps={task.log_every}",
        f"--trainer.gradient_clip_val={task.clip}",
        f"--last_checkpoint.every_n_steps={task.checkpoint_every}",
        f"--model.blocks.compile={str(task.compile).lower()}",
        f"--model.optim.learning_rate={task.learning_rate}",
        f"--model.optim.warmup={task.warmup}",
        *task.flags,
    ]


@contextlib.contextmanager
def edited(task: Task) -> Generator[None]:
    """module.py as its user would edit it for the task's model."""
    as_shipped = LanguageModule.training_step

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if task.architecture is not None:
            return as_shipped(self, batch, batch_idx)
        loss, accuracy = loss_of(self.model, batch)
        self.track("train/loss", loss)
        self.track("train/token_accuracy", accuracy)
        return loss

    with (
        patch.dict(os.environ),
        patch.object(LanguageModule, "build_model", lambda self, data: task.build()),
        patch.object(LanguageModule, "training_step", training_step),
    ):
        if "RANK" not in os.environ:
            os.environ.pop("DIST_RUN_ID", None)  # of the run before in this process
        yield
