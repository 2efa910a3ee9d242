"""Records the inputs and outputs of every module in a forward pass, and finds the first that two passes disagree on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import locations

INPUT = "the input of "
EXPERTS = ".experts."  # modules below get each expert's tokens, whose order and number differ between strategies


class ForwardHooks:
    """Hooks on all modules of `root`; `tensors` fills in the order in which modules are entered and left.

    tensors    {"the input of NAME": first tensor argument, "NAME": first output tensor}, full tensors on the host
    inside     names of the modules whose forward has been entered and not left, the innermost last
    """

    def __init__(self, root: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.inside: list[str] = []
        self._hooks: list[Any] = []
        for name, module in root.named_modules():
            before = module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: self._enter(name, args, kwargs), with_kwargs=True
            )
            after = module.register_forward_hook(lambda _, args, output, name=name: self._leave(name, output))
            self._hooks += [before, after]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def changed(self) -> None:
        """Called before a module is entered or left; the code of `inside[-1]` has run since the last call."""

    def _enter(self, name: str, args: Any, kwargs: Any) -> None:
        self.changed()
        self.inside.append(name)
        self._keep(
            INPUT + name, next((value for value in [*args, *kwargs.values()] if isinstance(value, Tensor)), None)
        )

    def _leave(self, name: str, output: Any) -> None:
        self.changed()
        while self.inside and self.inside.pop() != name:
            pass  # recomputation stops as soon as it has what it needs, in the middle of a module
        first = output[0] if isinstance(output, tuple) and output else getattr(output, "logits", output)
        self._keep(name, first)

    def _keep(self, key: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point() and key not in self.tensors:  # not the recomputed
            self.tensors[key] = full(value)


class ForwardCall:
    """Records the arguments of the LightningModule's first forward pass, which are the user's choice, to repeat it."""

    def __init__(self, module: nn.Module) -> None:
        self.arguments: tuple[Any, Any] | None = None
        self._handle = module.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not inspect.ismethod(module.forward):  # Lightning's way to training_step through a wrapper, as DDP's
            return
        self.arguments = (args, kwargs)
        self._handle.remove()

    def repeat(self, module: nn.Module, changed: Mapping[Tensor, Tensor] | None = None) -> Any:
        """Calls the module again; returns None if its forward was never called. `changed`: tensors to replace."""
        if self.arguments is None:
            return None
        replaced = {id(tensor): by for tensor, by in (changed or {}).items()}
        args, kwargs = apply_to_collection(self.arguments, Tensor, lambda tensor: replaced.get(id(tensor), tensor))
        return module(*args, **kwargs)


def full(tensor: Tensor) -> Tensor:
    """The unsharded tensor, on the host. Collective for a DTensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def locate_modules(root: nn.Module) -> dict[str, str]:
    """Module name -> its class and where its `forward` is defined."""
    return {name: locations.of_module(module) for name, module in root.named_modules()}


def first_different(
    expected: Mapping[str, Tensor], got: Mapping[str, Tensor], rows: tuple[int, int], tolerance: float
) -> str:
    """The first key of `expected` whose values differ in the rows that both have; "" if none does.

    Tensors that are sharded over ranks or not ordered by row have other shapes, and are skipped.

    Args:
        expected: Of one forward pass.
        got: Of another, with the same sequences in the rows that both have.
        rows: Sequences of the first and of the second pass.
        tolerance: Relative to a tensor's largest value.
    """
    for key, want in expected.items():
        have = got.get(key)
        if have is None or EXPERTS in key or not want.ndim or not have.ndim or have.shape[1:] != want.shape[1:]:
            continue
        per_row = len(want) // rows[0]
        if per_row * rows[0] != len(want) or per_row * rows[1] != len(have):
            continue
        num = min(len(want), len(have))
        difference = (want[:num].double() - have[:num].double()).abs().max().item() if want.numel() else 0.0
        if not difference <= tolerance * want.abs().max().item():
            return key
    return ""


def describe(key: str, places: Mapping[str, str]) -> str:
    """`key`, and the code that made it: a module's own, or for an input that of the module around it."""
    if not key.startswith(INPUT):
        return f"the output of {key or 'the module'} ({places.get(key, '?')})"
    parent = key.removeprefix(INPUT).rpartition(".")[0]
    while parent and (places.get(parent, "").startswith(("ModuleList", "ModuleDict")) or parent not in places):
        parent = parent.rpartition(".")[0]  # a container runs no code
    return f"{key}: it is computed in {parent or 'the module'} ({places.get(parent, '?')})"
