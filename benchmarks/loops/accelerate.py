"""A hand-written loop with Hugging Face's accelerate, as its documentation turns a loop of torch's into one."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from ..arms import Sample
from .lightning import Batches
from .stopwatch import Stopwatch
from .task import Log, Task, loss_of

PRECISIONS = {"32-true": "no", "bf16-mixed": "bf16"}


def train(task: Task) -> Sample:
    accelerator = Accelerator(cpu=task.device == "cpu", mixed_precision=PRECISIONS[task.precision])
    model = task.build()
    optimizer = task.optimizer(model)
    loader = torch.utils.data.DataLoader(Batches(task), batch_size=None)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, task.schedule(optimizer))
    log, stopwatch = Log(task, "accelerate"), Stopwatch(task)
    for step, batch in enumerate(loader, start=1):
        log.fetched()
        loss, accuracy = loss_of(model, batch)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), task.clip)
        assert norm is not None
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        log.add(loss, accuracy, norm)
        if step % task.log_every == 0:
            log.write(step, scheduler.get_last_lr()[0])
        if step % task.checkpoint_every == 0:
            accelerator.save_state(str(task.folder / f"accelerate_{step}"))
        stopwatch.tick(step)
    AcceleratorState._reset_state(reset_partial_state=True)
    return stopwatch.result()
