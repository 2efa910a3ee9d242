"""A hand-written pipeline: torch's schedule over two halves of a Llama, as torch's own tutorial has it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from ..arms import Sample
from .stopwatch import Stopwatch
from .task import Log, Task, place_in_world

MICRO_BATCHES = 4


class Part(nn.Module):
    """The layers of one stage, under their own names."""

    def __init__(self, whole: Any, rank: int, ranks: int) -> None:
        super().__init__()
        inner, per_rank = whole.model, len(whole.model.layers) // ranks
        self.config, self.rotary_emb = whole.config, inner.rotary_emb
        self.layers = inner.layers[rank * per_rank : (rank + 1) * per_rank]
        self.embed_tokens = inner.embed_tokens if rank == 0 else None
        self.norm, self.lm_head = (inner.norm, whole.lm_head) if rank == ranks - 1 else (None, None)

    def forward(self, given: Tensor, position_ids: Tensor) -> Tensor:
        from transformers.masking_utils import create_causal_mask

        hidden = self.embed_tokens(given) if self.embed_tokens else given
        rotations = self.rotary_emb(hidden, position_ids=position_ids)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=hidden, attention_mask=None, past_key_values=None,
            position_ids=position_ids,
        )  # fmt: skip
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_ids=position_ids, position_embeddings=rotations)
        return self.lm_head(self.norm(hidden)) if self.norm and self.lm_head else hidden


def train(task: Task) -> Sample:
    rank, ranks = place_in_world()
    dist.init_process_group("gloo")
    part = Part(task.build(), rank, ranks)
    is_first, is_last = rank == 0, rank == ranks - 1
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss)
    optimizer = task.optimizer(part)
    scheduler = task.schedule(optimizer)
    log, stopwatch = Log(task, "hand_pp", rank, ranks), Stopwatch(task)
    batches = replace(task, steps=task.steps * MICRO_BATCHES).batches()
    for step in range(1, task.steps + 1):
        micro_batches = list(islice(batches, MICRO_BATCHES))
        log.fetched()
        names = micro_batches[0].keys()
        batch = {name: torch.cat([each[name] for each in micro_batches]) for name in names}
        losses: list[Tensor] = []
        given = [batch["input_ids"]] if is_first else []
        targets: dict[str, Any] = {"target": batch["labels"], "losses": losses} if is_last else {}
        schedule.step(*given, position_ids=batch["position_ids"], return_outputs=False, **targets)
        mean = torch.stack(losses).mean().detach() if is_last else torch.zeros(())
        dist.broadcast(mean, ranks - 1)
        norm = clip(part, task.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        log.add(mean, mean, norm)
        if step % task.log_every == 0:
            log.write(step, scheduler.get_last_lr()[0])
        stopwatch.tick(step)
    return stopwatch.result()


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def clip(part: nn.Module, limit: float) -> Tensor:
    """() the norm of the gradients of all stages, before they are scaled."""
    square = nn.utils.get_total_norm(p.grad for p in part.parameters() if p.grad is not None).square()
    dist.all_reduce(square)
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(part.parameters(), limit, norm)
    return norm
