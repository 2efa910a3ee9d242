"""Divides a model into the stages of a pipeline, in place.

    stage 0        the modules before the blocks (embedding), blocks 0 to a - 1
    stage 1 …      blocks a to b - 1, …
    last stage     the last blocks, the modules after them (norm, output layer)

Every rank keeps the model's tree of modules, names and `forward`. Modules of other ranks are
replaced by ones without parameters, and a forward pass runs one stage: the modules before it are
passed over, its first block is given what the stage before has sent, and the output of its last
block is kept. So masks, positions and rotary embeddings are the model's own on every rank, and any
model works whose blocks are in one nn.ModuleList, take hidden states first and return them."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....compat import wrap_method
from ....errors import InputError
from ...configured import ARGS
from .partition import ModelParts

PLAIN = (bool, int, float, str, type(None))


class StageEnd(Exception):
    """Ends a training step at the end of its stage: the loss is computed on the last stage only."""


class StagePass:
    """The forward pass of one stage through the model."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.start = self.stop = 0  # the stage's first block, and one more than its last
        self.micro_batch = 0  # its number in the optimizer step
        self.received: Tensor | None = (
            None  # (B, T, D) the output of the stage before; None for the first
        )
        self.sent: Tensor | None = (
            None  # the output of the stage, once it has run; None for the last
        )
        self.is_active = (
            False  # whether a forward pass runs one stage; else all modules work as usual
        )
        self.ends_step = (
            False  # whether the model's end raises StageEnd, unless the stage is the last
        )
        self.is_past_embedding = False

    @property
    def is_last(self) -> bool:
        return self.stop == self.num_blocks

    @property
    def is_inside(self) -> bool:
        """Whether the module that runs is one of the stage, and not passed over."""
        has_started = self.is_past_embedding or self.start == 0
        return has_started and (self.is_last or self.sent is None)

    @contextmanager
    def running(
        self, bounds: tuple[int, int], received: Tensor | None, ends_step: bool
    ) -> Generator[None]:
        """Inside, a forward pass runs the stage with these bounds."""
        self.start, self.stop = bounds
        self.received, self.sent, self.ends_step = received, None, ends_step
        self.is_active, self.is_past_embedding = True, False
        try:
            yield
        finally:
            self.is_active, self.received = False, None

    def end(self, *_: object) -> None:
        """Hook at the end of the model."""
        if self.is_active and self.ends_step and not self.is_last:
            raise StageEnd


class RemoteParameter(NamedTuple):
    """What models ask of a parameter outside of its module: Llama-4 moves its inputs to
    `embed_tokens.weight.device` on every rank."""

    device: torch.device
    dtype: torch.dtype


class RemoteModule(nn.Module):
    """Takes the place of a module whose parameters are on another rank; `device` is this rank's."""

    def __init__(self, of: nn.Module, device: torch.device) -> None:
        super().__init__()
        plain: dict[str, object] = {}
        for name, value in vars(of).items():
            if isinstance(value, PLAIN):
                plain[name] = value
        for name, parameter in of.named_parameters(recurse=False):
            plain[name] = RemoteParameter(device, parameter.dtype)
        vars(self).update(plain, training=of.training, of=type(of).__name__)


class BlockProxy:
    """Runs a block if it belongs to the current stage, else passes hidden states through."""

    def __init__(self, block: nn.Module, number: int, stage: StagePass) -> None:
        self._block, self._number, self._stage = block, number, stage

    def __call__(self, *args: object, **kwargs: object) -> object:
        stage, number = self._stage, self._number
        hidden: Any = (*args, *kwargs.values())[0]
        if stage.start <= number < stage.stop:
            if number == stage.start > 0 and hidden is not stage.received:
                raise InputError(
                    "a pipeline needs blocks that are given the block before's output, unchanged:"
                    " move what is between them (a residual sum, a dropout) into the block"
                )
            output = self._block(*args, **kwargs)
            if isinstance(output, tuple):
                of = type(self._block).__name__.removeprefix("FSDP")
                raise InputError(
                    f"a pipeline needs blocks that return only hidden states, and {of} returns a"
                    f" tuple: set {ARGS}.pp_size to 1"
                )
            return output
        if number == stage.start - 1:
            return stage.received
        if number == stage.stop:
            stage.sent = hidden
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


class Blocks(nn.ModuleList):
    """ModuleList that yields proxies of its blocks during a forward pass of a stage."""

    def __init__(self, blocks: nn.ModuleList, stage: StagePass) -> None:
        super().__init__(blocks)
        self._stage = stage

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._visible())

    def __getitem__(self, idx: Any) -> Any:
        return self._visible()[idx]

    def _visible(self) -> list[Any]:
        blocks, stage = list(self.children()), self._stage
        if not stage.is_active:
            return blocks
        stage.is_past_embedding = True
        return [BlockProxy(block, number, stage) for number, block in enumerate(blocks)]


class Division:
    """A model on the meta device, divided in place. `bounds` has the first block of each stage and
    one more than its last, `here` the numbers of this rank's stages; `device` is this rank's. It
    raises InputError if the model cannot be divided."""

    def __init__(
        self, model: nn.Module, bounds: list[tuple[int, int]], here: list[int], device: torch.device
    ) -> None:
        parts, last = ModelParts.of(model), len(bounds) - 1
        blocks, self.bounds = parts.blocks, bounds
        self.stage = StagePass(len(blocks))  # that a forward pass runs
        ends = {0: parts.before, last: parts.after}
        local = [module for stage in here for module in ends.get(stage, ())]
        kept, before, after = map(_ids, (local, parts.before, parts.after))
        tied = before & after
        if 0 in here and last in here:  # one parameter; on two ranks each end has a copy
            tied = set()
        self._shared = list({id(p): (m, n) for m, n, p in _owners(local) if id(p) in tied}.values())

        for number, block in enumerate(blocks):
            if not any(bounds[stage][0] <= number < bounds[stage][1] for stage in here):
                blocks[number] = RemoteModule(block, device)
        model.set_submodule(parts.path, Blocks(blocks, self.stage))
        self._gated: list[tuple[nn.Module, bool]] = []
        for module in parts.before + parts.after:
            is_before, is_local = module in parts.before, False
            remote = RemoteModule(module, device)  # while it has its parameters
            for name, child in [*module.named_children()] if module not in local else ():
                if not _ids([child]) & kept:  # beside the copy of a tied layer
                    module.add_module(name, RemoteModule(child, device))
            for owner, name, parameter in _owners([module]):
                if id(parameter) in kept:
                    is_local = True
                elif kept:  # a tied layer's bias, of the other end
                    setattr(owner, name, None)
            if not is_local:
                name = next(name for name, each in model.named_modules() if each is module)
                module = remote
                model.set_submodule(name, module)
            self._gated.append((module, is_before))
        # Of each of this rank's stages, the modules with its parameters
        self.modules = {
            stage: [*blocks[slice(*bounds[stage])], *ends.get(stage, ())] for stage in here
        }

    def gate(self, model: nn.Module) -> None:
        """Passes over modules of other stages in a forward pass; call it when `model` is sharded.
        Tensor parallelism wraps `forward`, FSDP2 registers hooks: these have to run inside, those
        before."""
        for module, is_before in self._gated:
            wrap_method(module, "forward", self._gate(module, is_before))
        model.register_forward_hook(self.stage.end)

    def _gate(self, module: nn.Module, is_before: bool) -> Callable[..., object]:
        """Returns a forward that passes over `module` in stages to which it does not belong."""
        stage, name = self.stage, getattr(module, "of", type(module).__name__)

        def forward(run: Callable[..., object], *args: object, **kwargs: object) -> object:
            if not stage.is_active:
                return run(*args, **kwargs)
            if stage.is_past_embedding == is_before:
                raise InputError(
                    f"a pipeline needs modules in the order of their use: {name} is defined on one"
                    " side of the blocks, and called on the other; edit build_model"
                )
            if is_before and stage.start > 0:
                # DeepSeek-V4 makes its streams (B, T, S, D) of it, which the blocks before this
                # stage's replace
                received: Any = stage.received
                return received[:, :, 0] if received.dim() > 3 else received
            if not is_before and not stage.is_last:
                return (*args, *kwargs.values())[0]
            return run(*args, **kwargs)

        return forward

    @property
    def shared(self) -> list[nn.Parameter]:
        """Parameters that the first and the last stage, on two ranks, both have (tied ones)."""
        return [getattr(owner, name) for owner, name in self._shared]


def _ids(modules: list[nn.Module]) -> set[int]:
    return set(map(id, nn.ModuleList(modules).parameters()))


def _owners(modules: list[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for owner in nn.ModuleList(modules).modules():
        for name, parameter in owner.named_parameters(recurse=False):
            yield owner, name, parameter
