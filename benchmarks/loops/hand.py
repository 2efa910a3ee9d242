"""torch alone: the reference of the others. DDP and FSDP2 as a specialist sets them."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..arms import Sample
from .stopwatch import Stopwatch
from .task import Log, Task, loss_of, place_in_world


def train(task: Task) -> Sample:
    rank, ranks = place_in_world()
    if ranks > 1:
        dist.init_process_group("nccl" if task.device == "cuda" else "gloo")
    model = placed(task, task.build())
    optimizer = task.optimizer(model)
    scheduler = task.schedule(optimizer)
    half = (
        torch.autocast(task.device, torch.bfloat16)
        if task.precision == "bf16-mixed"
        else contextlib.nullcontext()
    )
    log, stopwatch = (
        Log(task, "hand" if ranks == 1 else f"hand_{task.strategy}", rank, ranks),
        Stopwatch(task),
    )
    for step, batch in enumerate(task.batches(rank), start=1):
        log.fetched()
        if task.device == "cuda":
            batch = {
                name: value.pin_memory().to("cuda", non_blocking=True)
                for name, value in batch.items()
            }
        with half:
            loss, accuracy = loss_of(model, batch)
        loss.backward()
        norm = clip(model, task.clip)
        learning_rate = scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        log.add(loss, accuracy, norm)
        if step % task.log_every == 0:
            log.write(step, learning_rate)
        stopwatch.tick(step)
    # The group is left to the process's end: destroyed before DDP's reducer, gloo (torch 2.13) may
    # wait forever.
    return stopwatch.sample


def placed(task: Task, model: nn.Module) -> nn.Module:
    """`model` on its device, compiled, sharded and wrapped as `task` says."""
    model = model.to(task.device)
    inner: Any = getattr(model, "model", None)  # Null has none
    blocks = list(inner.layers) if inner else []
    if task.compile:
        for block in blocks:
            block.compile()
    if task.strategy == "ddp":
        # Every parameter has a gradient in every step, so buckets need no search; no buffer changes
        # in training.
        return nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True, forward_sync_buffers=False
        )
    if task.strategy == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        # in torchtitan's groups: embedding, each block, and norm with head, which backward needs
        # first
        if inner:
            for module in (inner.embed_tokens, *blocks):
                fully_shard(module)
            ends: Any = [inner.norm, model.lm_head]
            fully_shard(ends, reshard_after_forward=False)
        fully_shard(model)
    return model


def clip(model: nn.Module, limit: float) -> Tensor:
    """() the norm of all gradients, over all ranks, before they are scaled."""
    norm = nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm
