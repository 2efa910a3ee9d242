"""torch's schedules, with a stage that runs a function of this rank in place of a module."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)
from torch.utils.checkpoint import GraphExecGroup

from .costs import Schedule

PipelineSchedule = PipelineScheduleSingle | PipelineScheduleMulti
SCHEDULES: dict[str, type[Any]] = {name: get_schedule_class(name) for name in get_args(Schedule)}


class Stage(PipelineStage):
    """torch's stage, which runs a function of this rank in place of a module.

    The sizes of its messages are given: torch would run the model twice to find them, hooks and
    all.
    """

    run: Callable[[Stage, int, Tensor | None], Tensor]

    def __init__(self, pipeline: Any, number: int, key: tuple[object, ...]) -> None:
        is_last = number == pipeline.num_stages - 1
        scalar = torch.empty((), device="meta", requires_grad=True)
        index = torch.empty(1, dtype=torch.int64, device="meta")
        given = index if number == 0 else pipeline.hidden_of(number, key)
        result = scalar if is_last else pipeline.hidden_of(number + 1, key)
        modules = nn.ModuleList(pipeline.division.modules[number])
        super().__init__(
            modules, number, pipeline.num_stages, pipeline.device, given, result,
            group=pipeline.messages,
        )  # fmt: skip
        self._number, self._clocks = 0, pipeline.clocks

    @contextmanager
    def _timed(self) -> Generator[None]:
        if clock := self._clocks.get(self.stage_index):
            clock.start()
        yield
        if clock:
            clock.stop()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> object:
        self._number = fwd_chunk_id
        with self._timed():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._timed():
            super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        # Checkpointing recomputes a block once here, and not for each group of its weights.
        with self._timed(), GraphExecGroup():
            super().backward_weight_one_chunk(*args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Tensor, **_: object) -> Tensor:
        return self.run(self, self._number, None if self.is_first else args[0])


class _AddedLoss(torch.autograd.Function):
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


def with_losses(hidden: Tensor, module: Any, batch: object, num: int) -> Tensor:
    """Adds the loss terms of this stage's routers, which the last stage does not see."""
    loss: Tensor | None = None
    for name, weight, value in module.balancer.losses(batch):
        module.track(name, value)
        loss = weight * value if loss is None else loss + weight * value
    return _AddedLoss.apply(hidden, None if loss is None else (loss / num).float())


@contextmanager
def unreduced(units: Sequence[FSDPModule]) -> Generator[None]:
    """Inside, FSDP2 keeps what it has gathered, and accumulates gradients without a reduction."""
    for unit in units:
        unit.set_is_last_backward(False)
        unit.set_requires_gradient_sync(False, recurse=False)
        unit.set_reshard_after_forward(False, recurse=False)
        unit.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_is_last_backward(True)
            unit.set_requires_gradient_sync(True, recurse=False)
            unit.set_reshard_after_forward(True, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)


@contextmanager
def own_error() -> Generator[None]:
    """torch puts the arguments' tensors into a RuntimeError of its own."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None and "failed to run forward" in str(error):
            raise error.__cause__ from None
        raise
