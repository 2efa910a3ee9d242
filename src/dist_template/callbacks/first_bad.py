"""Where a NaN or an infinity begins: one look at weights, activations and gradients, once bad numbers were seen.

Nothing is watched while training is well. The batch of the bad step is kept, and run again under hooks on every module,
by all ranks alike: forward, and backward to the activations alone, so no parameter gets a gradient and no strategy
reduces any. The weights have moved by one step since: what then is finite everywhere is said to be "not seen again".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import weights
from ..model.any_module import metrics_of
from ..model.metrics import MetricBuffer

Sound = list[Tensor]  # () bools on the device, one for each tensor: whether it is finite


def first_bad(trainer: Any, module: nn.Module, batches: list[Any]) -> dict[str, Any] | None:
    """The first module, in order of execution, that makes numbers that are not finite from ones that are. Collective.

    Returns:
        what (weight, output or gradient), module (its name, or the weight's), ranks (that saw it). None: not again.
    """
    # A weight's NaN is in one rank's shard: all ranks skip the forward, or all take part in its collectives.
    return _agreed(_bad_weight(module)) or _agreed(_bad_module(trainer, module, batches))


def _agreed(own: tuple[str, str] | None) -> dict[str, Any] | None:
    """The finding of the first rank that has one, with all ranks that have the same; collective."""
    seen = [(rank, found) for rank, found in enumerate(weights.from_all_ranks(own)) if found]
    if not seen:
        return None
    what, name = seen[0][1]
    return {"what": what, "module": name, "ranks": [rank for rank, found in seen if found == seen[0][1]]}


def _bad_weight(module: nn.Module) -> tuple[str, str] | None:
    """The first parameter or buffer, of this rank's part, that is not finite."""
    names, sound = [], []
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        part = tensor.to_local() if isinstance(tensor, DTensor) else getattr(tensor, "ds_tensor", tensor)
        if part.numel() and part.is_floating_point():
            names.append(name)
            sound.append(part.detach().isfinite().all())
    bad = _broken([([], [each]) for each in sound])
    return ("weight", names[bad[0]]) if bad else None


def _bad_module(trainer: Any, module: Any, batches: list[Any]) -> tuple[str, str] | None:
    """By the forward of any micro-batch, else by its backward."""
    devices = [module.device] if module.device.type == "cuda" else []
    found = None
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code calls no hook that came later
        buffer = vars(metrics_of(module))
        stack.callback(buffer.update, dict(buffer))
        buffer.update(vars(MetricBuffer()))
        for batch in batches:
            watch = _Watch(module)
            with watch, trainer.precision_plugin.train_step_context():
                output = module.training_step(batch, 0)
                watch.backward(output["loss"] if isinstance(output, dict) else output)
            found = found or watch.bad()
    return found


class _Watch:
    """Hooks on every submodule: are its inputs and outputs finite, and are their gradients?"""

    def __init__(self, module: nn.Module) -> None:
        self.modules = [(name, each) for name, each in module.named_modules() if name]
        self.calls: list[tuple[str, Sound, Sound]] = []  # name, inputs, outputs; in the order in which they end
        self.flows: dict[str, tuple[Sound, Sound]] = {}  # name -> of the gradients of its inputs, of its outputs
        self.start: Tensor | None = None  # the first activation that has a gradient
        self.loss: Tensor | None = None

    def __enter__(self) -> None:
        hooks = [(partial(self._called, name), each) for name, each in self.modules]
        self.handles = [each.register_forward_hook(hook, with_kwargs=True) for hook, each in hooks]

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def backward(self, loss: Tensor) -> None:
        self.loss = _finite(loss)
        if self.start is not None and loss.requires_grad:
            torch.autograd.grad(loss, self.start, allow_unused=True)

    def bad(self) -> tuple[str, str] | None:
        """The first call whose output is the first that is not finite; else the last such gradient, as seen forward."""
        calls = [(name, before, after) for name, before, after in self.calls if after]
        if broke := _broken([(before, after) for _, before, after in calls]):
            return "output", calls[broke[0]][0]
        if self.loss is not None and _broken([([], [self.loss])]):
            return "output", "the loss"
        flows = [(name, after, before) for name, (before, after) in self.flows.items() if before and after]
        if broke := _broken([(after, before) for _, after, before in flows]):
            return "gradient", max((flows[index][0] for index in broke), key=lambda name: name.count("."))
        return ("gradient", "the loss") if _broken([([], after) for _, after, _ in flows]) else None

    def _called(self, name: str, module: nn.Module, inputs: Any, options: Any, output: Any) -> None:
        before, after = list(_floats([inputs, options])), list(_floats(output))
        # A mask has minus infinities; in anything else they are an output's before they are an input.
        masked = [each.detach().masked_fill(each == -torch.inf, 0) for each in before]
        self.calls.append((name, [_finite(each) for each in masked], [_finite(each) for each in after]))
        flow = self.flows.setdefault(name, ([], []))
        for tensors, sound in ((before, flow[0]), (after, flow[1])):
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(partial(_note, sound))
                    self.start = tensor if self.start is None else self.start


def _note(sound: Sound, gradient: Tensor) -> None:
    sound.append(_finite(gradient))


def _floats(value: Any) -> Iterator[Tensor]:
    """The tensors of real numbers in nested tuples, lists and mappings, transformers' outputs among them."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _floats(each)


def _finite(tensor: Tensor) -> Tensor:
    part = tensor.detach()
    return (part.to_local() if isinstance(part, DTensor) else part).isfinite().all()


def _broken(pairs: list[tuple[Sound, Sound]]) -> list[int]:
    """Which have all of the first finite and not all of the second; one read of the device."""
    if not pairs:
        return []
    first, second = (torch.stack([_all(pair[side]) for pair in pairs]) for side in (0, 1))
    return (first & ~second).nonzero().flatten().tolist()


def _all(sound: Sound) -> Tensor:
    return torch.stack([each.cpu() for each in sound]).all() if sound else torch.tensor(True)
