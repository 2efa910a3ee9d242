"""Records inputs and outputs of every module in a forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

INPUT = "the input of "
EXPERTS = ".experts."  # inside, the order and number of tokens differ between strategies


class ForwardHooks:
    """Forward hooks on all modules of `root`.

    tensors    {"the input of NAME": first tensor argument, "NAME": first output tensor},
               unsharded, on the host, in execution order
    inside     names of the modules whose forward is running, the innermost last
    """

    def __init__(self, root: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.inside: list[str] = []
        self._handles: list[Any] = []
        for name, module in root.named_modules():

            def enter(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
                self._enter(name, [*args, *kwargs.values()])

            def leave(_: Any, args: Any, output: Any, name: str = name) -> None:
                self._leave(name, output)

            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(leave))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def changed(self) -> None:
        """Called before a module is entered or left, after code of `inside[-1]`; for subclasses."""

    def _enter(self, name: str, arguments: list[Any]) -> None:
        self.changed()
        self.inside.append(name)
        self._keep(INPUT + name, next((v for v in arguments if isinstance(v, Tensor)), None))

    def _leave(self, name: str, output: Any) -> None:
        self.changed()
        while self.inside and self.inside.pop() != name:
            pass  # activation recomputation may stop in the middle of a module
        if isinstance(output, tuple) and output:
            output = output[0]
        self._keep(name, getattr(output, "logits", output))

    def _keep(self, key: str, value: Any) -> None:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        if is_float and key not in self.tensors:  # it is when activations are recomputed
            self.tensors[key] = full(value)


class ForwardCall:
    """Records the arguments of the module's first forward call, to repeat the call later."""

    def __init__(self, module: nn.Module) -> None:
        self.arguments: tuple[Any, Any] | None = None
        self._handle = module.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if inspect.ismethod(module.forward):  # DDP calls forward as a wrapper of training_step
            self.arguments = (args, kwargs)
            self._handle.remove()

    def repeat(self, module: nn.Module, changed: Mapping[Tensor, Tensor] | None = None) -> Any:
        """Repeats the call with `changed` tensors replaced; returns None if there was no call."""
        if self.arguments is None:
            return None
        by_id = {id(tensor): new for tensor, new in (changed or {}).items()}
        args, kwargs = apply_to_collection(self.arguments, Tensor, lambda t: by_id.get(id(t), t))
        return module(*args, **kwargs)


def full(tensor: Tensor) -> Tensor:
    """Returns the unsharded tensor on the host. Collective for a DTensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def describe(key: str, places: Mapping[str, str]) -> str:
    """Returns a key of `ForwardHooks.tensors` with the code that computes the tensor."""
    if not key.startswith(INPUT):
        return f"the output of {key or 'the module'} ({places.get(key, '?')})"
    parent = key.removeprefix(INPUT).rpartition(".")[0]
    while parent and places.get(parent, "ModuleList").startswith(("ModuleList", "ModuleDict")):
        parent = parent.rpartition(".")[0]  # a container runs no code
    return f"{key}: it is computed in {parent or 'the module'} ({places.get(parent, '?')})"
