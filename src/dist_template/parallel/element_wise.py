"""What an optimizer of a user's does with shards: it is tried on small parameters at the start.

ZeRO gives each rank a part of all parameters, flattened to one tensor; FSDP2 gives it DTensors. An
optimizer that needs a full parameter, for a norm or a matrix, would train otherwise than on one
device, or fail with torch's error about a placement."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from ..compat.lightning import torch_optimizer
from ..errors import reason

ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam")
ELEMENTWISE += ("RMSprop", "Rprop", "SGD")
SHAPES = {1: (7,), 2: (3, 4), 3: (2, 3, 2), 4: (2, 3, 2, 2), 5: (3, 2, 2, 1, 2)}
STEPS = 3


def is_known(optimizer: Optimizer) -> bool:
    """Returns whether nothing has to be tried: torch's element-wise optimizers, this library's, and
    DeepSpeed's own."""
    kind = type(torch_optimizer(optimizer))
    if kind.__module__.startswith("torch.optim."):
        return kind.__name__ in ELEMENTWISE
    return kind.__module__.partition(".")[0] in (__name__.partition(".")[0], "deepspeed")


class Trial:
    """Trains small parameters with the dimensions of an optimizer's own, by its class and
    settings."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._given: Any = torch_optimizer(optimizer)
        parameters = [p for group in self._given.param_groups for p in group["params"]]
        self._device = parameters[0].device
        self._draw = torch.Generator().manual_seed(0)
        shapes = [SHAPES[n] for n in sorted({p.ndim for p in parameters} & SHAPES.keys())]
        self.values = self._drawn(shapes)
        self.gradients = [self._drawn(shapes) for _ in range(STEPS)]

    def _drawn(self, shapes: list[tuple[int, ...]]) -> list[Tensor]:
        drawn = [torch.randn(shape, generator=self._draw) for shape in shapes]
        return [tensor.to(self._device) for tensor in drawn]

    def trained(self, values: list[Tensor], steps: list[list[Tensor]]) -> list[Tensor]:
        """Returns what a new optimizer makes of `values` with these gradients."""
        parameters = [nn.Parameter(value.clone()) for value in values]
        kind = type(self._given)
        accepted = inspect.signature(kind).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
        settings = {
            name: value
            for name, value in self._given.defaults.items()
            if takes_any or name in accepted
        }
        optimizer: Any = kind(parameters, **settings)
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        needs_closure = closure is not None and closure.default is closure.empty
        for gradients in steps:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step(*[lambda: torch.zeros(())] if needs_closure else [])
        return [parameter.detach() for parameter in parameters]


def is_element_wise(optimizer: Optimizer) -> bool:
    """Returns whether `optimizer` updates each element by its own gradients alone: whether it
    updates parameters together as two others update two parts of them, flattened."""
    try:
        trial = Trial(optimizer)
        together = _flat(trial.trained(trial.values, trial.gradients))
        middle = len(together) // 2 + 1

        def part(tensors: list[Tensor], which: slice) -> list[Tensor]:
            return [_flat(tensors)[which]]

        parts = [
            trial.trained(
                part(trial.values, which), [part(each, which) for each in trial.gradients]
            )[0]
            for which in (slice(middle), slice(middle, None))
        ]
    except Exception:  # whatever a class of somebody else's raises
        return False
    return torch.allclose(together, torch.cat(parts), 1e-5, 1e-6)


def why_not_on_shards(optimizer: Optimizer, mesh: Any) -> str:
    """Returns why `optimizer` does not update sharded parameters as full ones; "" if it does.
    Collective in `mesh`, which has one dimension."""

    def sharded(tensors: list[Tensor]) -> list[Tensor]:
        return [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in tensors]

    found: list[Tensor] = []
    try:
        trial = Trial(optimizer)
        expected = trial.trained(trial.values, trial.gradients)
        on_shards = trial.trained(
            sharded(trial.values), [sharded(each) for each in trial.gradients]
        )
        found = [each.full_tensor() if isinstance(each, DTensor) else each for each in on_shards]
    except Exception as error:  # whatever a class of somebody else's raises
        return reason(error)
    if torch.allclose(_flat(expected), _flat(found), 1e-4, 1e-6):
        return ""
    return "it updates a sharded parameter otherwise than a full one"


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
