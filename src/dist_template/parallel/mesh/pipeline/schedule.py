"""torch's schedules, with a stage that runs a function of this rank in place of a module."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils.checkpoint import GraphExecGroup

from ....compat.pipelining import PatchedStage
from .stages import Schedule

SCHEDULES: dict[Schedule, type[Any]] = {
    name: get_schedule_class(name) for name in get_args(Schedule)
}


class Stage(PatchedStage):
    """torch's stage, which runs a function of this rank in place of a module. The sizes of its
    messages are given: torch would run the model twice to find them."""

    run: Callable[[Stage, int, Tensor | None], Tensor]

    def __init__(self, pipeline: Any, number: int, key: tuple[object, ...]) -> None:
        is_last = number == pipeline.num_stages - 1
        scalar = torch.empty((), device="meta", requires_grad=True)
        index = torch.empty(1, dtype=torch.int64, device="meta")
        given = index if number == 0 else pipeline.hidden_of(number, key)
        result = scalar if is_last else pipeline.hidden_of(number + 1, key)
        modules = nn.ModuleList(pipeline.division.modules[number])
        of_pipeline = (pipeline.num_stages, pipeline.device)
        super().__init__(modules, number, *of_pipeline, given, result, group=pipeline.messages)
        self._number = 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> object:
        self._number = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        # Checkpointing recomputes a block once here, and not for each of its weights.
        with GraphExecGroup():
            super().backward_weight_one_chunk(*args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Tensor, **_: object) -> Tensor:
        return self.run(self, self._number, None if self.is_first else args[0])


class AddedLoss(torch.autograd.Function):
    """Returns hidden states, and gives a loss of their stage the gradient 1 in the backward pass.
    The idea is Megatron-LM's MoEAuxLossAutoScaler. The result shares memory with `hidden` and is no
    view of it: after a split backward pass torch (2.13) detaches a stage's output in place."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, loss: Tensor | None) -> Tensor:
        return hidden.new_empty(0).set_(hidden)  # ty: ignore[invalid-argument-type]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        is_needed = ctx.needs_input_grad[1]
        return gradients[0], torch.ones((), device=gradients[0].device) if is_needed else None


@contextmanager
def unreduced(units: Sequence[FSDPModule]) -> Generator[None]:
    """Inside, FSDP2 keeps what it has gathered, and accumulates gradients without a reduction."""

    def set_all(value: bool) -> None:
        for unit in units:
            unit.set_is_last_backward(value)
            unit.set_requires_gradient_sync(value, recurse=False)
            unit.set_reshard_after_forward(value, recurse=False)
            unit.set_reshard_after_backward(value, recurse=False)

    set_all(False)
    try:
        yield
    finally:
        set_all(True)
