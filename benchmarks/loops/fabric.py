"""A hand-written loop with Lightning's Fabric."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric

from ..arms import Sample
from .lightning import Batches
from .stopwatch import Stopwatch
from .task import Log, Task, loss_of


def train(task: Task) -> Sample:
    fabric = Fabric(accelerator=task.device, devices=1, precision=task.precision)  # ty: ignore[invalid-argument-type]
    model = task.build()
    model, optimizer = fabric.setup(model, task.optimizer(model))
    loader: Any = fabric.setup_dataloaders(torch.utils.data.DataLoader(Batches(task), batch_size=None))
    scheduler = task.schedule(optimizer.optimizer)
    log, stopwatch = Log(task, "fabric"), Stopwatch(task)
    for step, batch in enumerate(loader, start=1):
        log.fetched()
        loss, accuracy = loss_of(model, batch)
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=task.clip)
        assert norm is not None
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        log.add(loss, accuracy, norm)
        if step % task.log_every == 0:
            log.write(step, scheduler.get_last_lr()[0])
        if step % task.checkpoint_every == 0:
            fabric.save(task.folder / f"fabric_{step}.ckpt", {"model": model, "optimizer": optimizer})
        stopwatch.tick(step)
    return stopwatch.result()
