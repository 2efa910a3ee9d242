"""DeepSpeed's ZeRO-2 in a hand-written loop, which differs from torch's: the engine reduces, clips and steps."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from ..arms import Sample
from .stopwatch import Stopwatch
from .task import Log, Task, loss_of, place_in_world


def train(task: Task) -> Sample:
    rank, ranks = place_in_world()
    if task.device == "cpu":  # DeepSpeed would compile collectives over shared memory for a minute
        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})[builder.NAME] = False
    deepspeed.init_distributed("nccl" if task.device == "cuda" else "gloo")
    model = task.build()
    optimizer = task.optimizer(model)
    engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config(task))[0]
    scheduler = task.schedule(optimizer)
    log, stopwatch = Log(task, "hand_zero2", rank, ranks), Stopwatch(task)
    for step, batch in enumerate(task.batches(rank), start=1):
        log.fetched()
        if task.device == "cuda":
            batch = {name: value.pin_memory().to("cuda", non_blocking=True) for name, value in batch.items()}
        loss, accuracy = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        scheduler.step()
        log.add(loss, accuracy, torch.as_tensor(engine.get_global_grad_norm(), device=task.device))
        if step % task.log_every == 0:
            log.write(step, scheduler.get_last_lr()[0])
        if step % task.checkpoint_every == 0:
            engine.save_checkpoint(str(task.folder / "zero"), tag=str(step))
        stopwatch.tick(step)
    return stopwatch.result()


def config(task: Task) -> dict[str, Any]:
    """Buckets of 0.8 GB in fp32, reduced beside backward."""
    return {
        "train_micro_batch_size_per_gpu": task.batch_size,
        "gradient_clipping": task.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": task.precision.startswith("bf16")},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 200_000_000,
            "allgather_bucket_size": 200_000_000,
        },
    }
