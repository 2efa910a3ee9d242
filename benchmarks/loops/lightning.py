"""Lightning's Trainer with its defaults: its bar, its logger, its checkpoint callback, and four
values by `self.log` in each step, as Lightning's own examples log."""

import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..arms import Sample
from .project import Timer
from .stopwatch import Stopwatch
from .task import Task, loss_of


def train(task: Task) -> Sample:
    """Everything that is not an argument here is as Lightning sets it."""
    stopwatch = Stopwatch(task)
    # Lightning writes this process's rank into the environment, where the next arm would find it.
    with patch.dict(os.environ), tempfile.TemporaryDirectory(dir=task.folder) as folder:
        trainer = L.Trainer(
            accelerator=task.device,
            devices=1,
            precision=task.precision,  # ty: ignore[invalid-argument-type]
            max_steps=task.steps,
            log_every_n_steps=task.log_every,
            gradient_clip_val=task.clip,
            callbacks=[
                ModelCheckpoint(folder, every_n_train_steps=task.checkpoint_every),
                Timer(stopwatch),
            ],
            default_root_dir=folder,
        )
        trainer.fit(Module(task), DataLoader(Batches(task), batch_size=None))
    return stopwatch.sample


class Module(L.LightningModule):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.model = task.build()
        self.stepped = time.perf_counter()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, _ = loss_of(self.model, batch)
        self.log("train/loss", loss, prog_bar=True)
        scheduler: Any = self.lr_schedulers()
        self.log("train/learning_rate", scheduler.get_last_lr()[0])
        now = time.perf_counter()
        tokens = self.task.batch_size * self.task.seq_len
        self.log("perf/tokens_per_s", tokens / (now - self.stepped))
        self.stepped = now
        return loss

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, *_: Any, **__: Any
    ) -> None:
        """Lightning's own clipping does not return the norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)
        self.log("train/grad_norm", norm)

    def configure_optimizers(self) -> Any:
        optimizer = self.task.optimizer(self.model)
        return [optimizer], [{"scheduler": self.task.schedule(optimizer), "interval": "step"}]


class Batches(IterableDataset):
    """The task's, for a DataLoader that leaves them as they are."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.task.batches()
