"""Divides a model into the stages of a pipeline, in place.

    stage 0        the modules before the blocks (embedding), blocks 0 to a - 1
    stage 1 …      blocks a to b - 1, …
    last stage     the last blocks, the modules after them (norm, output layer)

Every rank keeps the model's tree of modules, names and `forward`. Modules of other ranks are
replaced by ones without parameters, and a forward pass runs one stage: the modules before it are
passed over, its first block is given what the stage before has sent, and the output of its last
block is kept. So masks, positions and rotary embeddings are the model's own on every rank, and any
model works whose blocks stand in one nn.ModuleList, take hidden states first and return them.

transformers' own division (5.23, `distributed/pipeline_parallel.py`) is for inference: it has no
backward pass and returns no loss."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.transformers import needs_values, run_on_meta
from ...errors import InputError, reason
from .partition import bounds_between, outline

PLAIN = (bool, int, float, str, type(None))


class StageEnd(Exception):
    """Ends a training step where its stage ends; what follows the model runs on the last stage."""


class Position:
    """The stage that a forward pass runs.

    Attributes:
        start: Its first block.
        stop: One more than its last block.
        received: The output of the stage before, (B, T, D); None for the first.
        sent: The output of the stage, once it has run; None for the last.
        is_active: Whether a forward pass runs one stage; else all modules work as they are.
        micro_batch: Its number in the optimizer step.
        raises: Whether the model's end is the end of a step, unless the stage is the last.
    """

    def __init__(self) -> None:
        self.num_blocks = self.start = self.stop = self.micro_batch = 0
        self.received: Tensor | None = None
        self.sent: Tensor | None = None
        self.is_active = self.raises = self.has_begun = False

    @property
    def is_last(self) -> bool:
        return self.stop == self.num_blocks

    @property
    def is_inside(self) -> bool:
        """Whether the module that runs is one of the stage, and not passed over."""
        return (self.has_begun or not self.start) and (self.is_last or self.sent is None)

    def enter(self, bounds: tuple[int, int], received: Tensor | None, raises: bool) -> None:
        self.start, self.stop = bounds
        self.received, self.sent, self.raises = received, None, raises
        self.is_active, self.has_begun = True, False

    def leave(self) -> None:
        self.is_active, self.received = False, None


class Elsewhere(nn.Module):
    """Stands in for a module whose parameters are on another rank."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(of).items() if isinstance(value, PLAIN)}
        vars(self).update(plain, training=of.training, of=type(of).__name__)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError("a module of another pipeline stage was called outside of a forward pass")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"a module of another pipeline stage has no {name!r} on this rank: use it inside"
                " the model's forward pass, or set pp_size to 1"
            ) from None


class _Seen:
    """What a forward pass calls in place of a block."""

    def __init__(self, block: nn.Module, number: int, position: Position) -> None:
        self._block, self._number, self._position = block, number, position

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        position, number = self._position, self._number
        hidden = args[0] if args else next(iter(kwargs.values()))
        if position.start <= number < position.stop:
            if number == position.start > 0 and hidden is not position.received:
                raise InputError(
                    "a pipeline needs blocks that are given the output of the block before as it"
                    " is: move what stands between them (a residual sum, a dropout) into the block"
                )
            return self._block(*args, **kwargs)
        if number == position.start - 1:
            return position.received
        if number == position.stop:
            _check_hidden(hidden)
            position.sent = hidden
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


class Blocks(nn.ModuleList):
    """The model's list of blocks, of which a forward pass sees one stage's."""

    def __init__(self, blocks: nn.ModuleList, position: Position) -> None:
        super().__init__(blocks)
        self._position = position

    def __iter__(self) -> Iterator[Any]:
        return iter(self._seen())

    def __getitem__(self, idx: Any) -> Any:
        return self._seen()[idx]

    def _seen(self) -> list[Any]:
        blocks, position = list(self.children()), self._position
        if not position.is_active:
            return blocks
        position.has_begun = True
        return [_Seen(block, number, position) for number, block in enumerate(blocks)]


class Division:
    """A model divided in place.

    Args:
        model: On the meta device.
        bounds: First block of each stage and one more than its last, in order.
        own: Numbers of this rank's stages.
        facts: What `partition.facts_of` returns.

    Attributes:
        position: Which stage a forward pass runs.
        parts: Of each of this rank's stages, the modules with its parameters.
        facts: What facts.json has of the stages.

    Raises:
        InputError: the model cannot be divided.
    """

    def __init__(
        self,
        model: nn.Module,
        bounds: list[tuple[int, int]],
        own: list[int],
        facts: dict[str, Any] | None = None,
    ) -> None:
        self.position, self.bounds = Position(), bounds
        self.facts = facts or {}
        position = self.position
        parent, name, before, after = outline(model)
        blocks: Any = getattr(parent, name)
        position.num_blocks = len(blocks)
        last = len(bounds) - 1
        outer = before * (0 in own) + after * (last in own)
        kept = {id(parameter) for module in outer for parameter in module.parameters()}
        tied = {id(p) for m in before for p in m.parameters()}
        tied &= {id(p) for m in after for p in m.parameters()}
        apart = tied & kept if (0 in own) != (last in own) else set()
        self._shared = {id(p): (m, n) for m, n, p in _owners(outer) if id(p) in apart}

        here = {number for stage in own for number in range(*bounds[stage])}
        for number, block in enumerate(blocks):
            if number not in here:
                blocks[number] = Elsewhere(block)
        setattr(parent, name, Blocks(blocks, position))
        self._gated: list[tuple[nn.Module, bool]] = []
        for module in before + after:
            comes_first, is_elsewhere = module in before, True
            for owner, own_name, parameter in _owners([module]):
                is_elsewhere &= id(parameter) not in kept
                if kept and id(parameter) not in kept:  # a tied layer's bias, of the other end
                    setattr(owner, own_name, None)
            module = _replace(model, module) if is_elsewhere else module
            self._gated.append((module, comes_first))
        ends = {0: before, last: after}
        self.parts = {
            stage: [blocks[i] for i in range(*bounds[stage])] + ends.get(stage, []) for stage in own
        }

    def gate(self, model: nn.Module) -> None:
        """Passes over modules of other stages in a forward pass; call it when `model` is sharded.

        Tensor parallelism wraps `forward`, FSDP2 registers hooks: these have to run inside, those
        before.
        """
        for module, comes_first in self._gated:
            _gate(module, self.position, comes_first)
        model.register_forward_hook(self._end_of_step)

    @property
    def shared(self) -> list[nn.Parameter]:
        """Parameters that the first and the last stage, on two ranks, both have (tied ones)."""
        return [getattr(owner, name) for owner, name in self._shared.values()]

    def _end_of_step(self, *_: Any) -> None:
        position = self.position
        if position.is_active and position.raises and not position.is_last:
            raise StageEnd


def try_stages(model: nn.Module, facts: dict[str, Any]) -> None:
    """Runs the first two stages and the last one; `model` is on the meta device, and not changed.

    Args:
        model: With all of its modules.
        facts: What `partition.facts_of` returns.

    Raises:
        InputError: the model cannot be divided, or a stage's forward pass fails.
    """
    bounds = bounds_between(facts["blocks"])
    hidden: Tensor | None = None
    for stage in sorted({0, 1, len(bounds) - 1}):
        divided = copy.deepcopy(model)
        (own,) = [stages for stages in facts["stages"] if stage in stages]
        division = Division(divided, bounds, own)
        division.gate(divided)
        division.position.enter(bounds[stage], hidden, raises=True)
        try:
            with suppress(StageEnd), torch.no_grad():
                run_on_meta(divided)
        except (IndexError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, InputError) or needs_values(error):
                raise
            raise InputError(
                f"stage {stage + 1} of {len(bounds)} needs more than the hidden states of the stage"
                f" before, or its blocks return more ({reason(error)})"
            ) from error
        hidden = division.position.sent


def _owners(modules: list[nn.Module]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    owners = [owner for module in modules for owner in module.modules()]
    return [(o, name, p) for o in owners for name, p in o.named_parameters(recurse=False)]


def _replace(model: nn.Module, module: nn.Module) -> nn.Module:
    (owner, name), *_ = [
        (m, name) for m in model.modules() for name, child in m.named_children() if child is module
    ]
    setattr(owner, name, Elsewhere(module))
    return getattr(owner, name)


def _gate(module: nn.Module, position: Position, comes_first: bool) -> None:
    """Passes over `module` in forward passes of stages that it is not part of."""
    forward, name = module.forward, getattr(module, "of", type(module).__name__)

    @functools.wraps(forward)
    def gated(*args: Any, **kwargs: Any) -> Any:
        if not position.is_active:
            return forward(*args, **kwargs)
        if position.has_begun == comes_first:
            defined, called = ("before", "after") if comes_first else ("after", "before")
            raise InputError(
                f"a pipeline needs modules in the order of their use: {name} is defined"
                f" {defined} the blocks and called {called} them; edit build_model"
            )
        if comes_first and position.start > 0:
            return position.received
        if not comes_first and not position.is_last:
            return args[0] if args else next(iter(kwargs.values()))
        return forward(*args, **kwargs)

    module.forward = gated


def _check_hidden(hidden: Any) -> None:
    if not isinstance(hidden, Tensor):
        raise InputError(
            f"a pipeline needs blocks that return their hidden states, a tensor, not"
            f" {type(hidden).__name__}: set pp_size to 1, or edit build_model"
        )
