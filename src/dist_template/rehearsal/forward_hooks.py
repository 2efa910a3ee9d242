"""Records inputs and outputs of every module in a forward pass, and finds where two passes first differ."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import code_locations

INPUT = "the input of "
EXPERTS = ".experts."  # inside, the order and number of tokens differ between strategies


class ForwardHooks:
    """Forward hooks on all modules of `root`.

    tensors    {"the input of NAME": first tensor argument, "NAME": first output tensor}, unsharded, on the host, in
               execution order
    inside     names of the modules whose forward is running, the innermost last
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
        """Called before a module is entered or left, after code of `inside[-1]` has run; for subclasses."""

    def _enter(self, name: str, args: Any, kwargs: Any) -> None:
        self.changed()
        self.inside.append(name)
        self._keep(
            INPUT + name, next((value for value in [*args, *kwargs.values()] if isinstance(value, Tensor)), None)
        )

    def _leave(self, name: str, output: Any) -> None:
        self.changed()
        while self.inside and self.inside.pop() != name:
            pass  # activation recomputation may stop in the middle of a module
        first = output[0] if isinstance(output, tuple) and output else getattr(output, "logits", output)
        self._keep(name, first)

    def _keep(self, key: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point() and key not in self.tensors:  # not when recomputed
            self.tensors[key] = full(value)


class ForwardCall:
    """Records the arguments of the LightningModule's first forward call, to repeat the call later."""

    def __init__(self, module: nn.Module) -> None:
        self.arguments: tuple[Any, Any] | None = None
        self._handle = module.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not inspect.ismethod(module.forward):  # DDP calls forward as a wrapper of training_step
            return
        self.arguments = (args, kwargs)
        self._handle.remove()

    def repeat(self, module: nn.Module, changed: Mapping[Tensor, Tensor] | None = None) -> Any:
        """Repeats the call with `changed` tensors replaced; returns None if forward was never called."""
        if self.arguments is None:
            return None
        replaced = {id(tensor): by for tensor, by in (changed or {}).items()}
        args, kwargs = apply_to_collection(self.arguments, Tensor, lambda tensor: replaced.get(id(tensor), tensor))
        return module(*args, **kwargs)


def full(tensor: Tensor) -> Tensor:
    """Returns the unsharded tensor on the host. Collective for a DTensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def locate_modules(root: nn.Module) -> dict[str, str]:
    """Returns {module name: its class, and the file:line of its `forward`}."""
    return {name: code_locations.of_module(module) for name, module in root.named_modules()}


def first_different(
    expected: Mapping[str, Tensor], got: Mapping[str, Tensor], rows: tuple[int, int], tolerance: float
) -> str:
    """Returns the first key of `expected` whose values differ in the common rows; "" if none does.

    Tensors that are sharded over ranks, or not ordered by row, have other shapes and are skipped.

    Args:
        expected: Tensors of one forward pass.
        got: Tensors of another, with the same sequences in the common rows.
        rows: Number of sequences in the first and in the second pass.
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
    """Returns `key` with the code that computes it: the module's, or for an input that of the parent module."""
    if not key.startswith(INPUT):
        return f"the output of {key or 'the module'} ({places.get(key, '?')})"
    parent = key.removeprefix(INPUT).rpartition(".")[0]
    while parent and (places.get(parent, "").startswith(("ModuleList", "ModuleDict")) or parent not in places):
        parent = parent.rpartition(".")[0]  # a container runs no code
    return f"{key}: it is computed in {parent or 'the module'} ({places.get(parent, '?')})"
