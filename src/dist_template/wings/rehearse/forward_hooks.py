"""Records inputs and outputs of every module in a forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial

from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

INPUT = "the input of "
EXPERTS = ".experts."  # inside, the order and number of tokens differ between strategies


class ForwardHooks:
    """Forward hooks on all modules of `root`.

    tensors    {"the input of NAME": first tensor argument, "NAME": first output tensor},
               unsharded, on the host, in execution order
    running    names of the modules whose forward is running, the innermost last
    """

    def __init__(self, root: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.running: list[str] = []
        self._handles: list[RemovableHandle] = []
        for name, module in root.named_modules():
            enter, leave = partial(self._enter, name), partial(self._leave, name)
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(leave))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def on_boundary(self) -> None:
        """Called after code of the module `running[-1]`; for subclasses."""

    def _enter(self, name: str, module: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
        self.on_boundary()
        self.running.append(name)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                self._record(INPUT + name, value)
                break

    def _leave(self, name: str, module: nn.Module, args: tuple, output: object) -> None:
        self.on_boundary()
        while self.running and self.running.pop() != name:
            continue  # activation recomputation may stop in the middle of a module
        if isinstance(tensor := main_output(output), Tensor):
            self._record(name, tensor)

    def _record(self, key: str, tensor: Tensor) -> None:
        """Keeps the first value: recomputation of activations runs a module again."""
        if tensor.is_floating_point() and key not in self.tensors:
            self.tensors[key] = full(tensor)


class ForwardCall:
    """Records the arguments of the module's first forward call, to repeat the call later."""

    def __init__(self, module: nn.Module) -> None:
        self.arguments: tuple[tuple, dict[str, object]] | None = None
        self._handle = module.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, module: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
        if inspect.ismethod(module.forward):  # DDP calls forward as a wrapper of training_step
            self.arguments = (args, kwargs)
            self._handle.remove()

    def repeat(self, module: nn.Module, changed: Mapping[Tensor, Tensor] | None = None) -> object:
        """Repeats the call with `changed` tensors replaced; returns None if there was no call."""
        if self.arguments is None:
            return None
        by_id = {id(tensor): new for tensor, new in (changed or {}).items()}
        args, kwargs = apply_to_collection(self.arguments, Tensor, lambda t: by_id.get(id(t), t))
        return module(*args, **kwargs)


def main_output(output: object) -> object:
    """Returns the first of several outputs, and `logits` of a transformers model's."""
    if isinstance(output, tuple) and output:
        output = output[0]
    return getattr(output, "logits", output)


def full(tensor: Tensor) -> Tensor:
    """Returns the unsharded tensor on the host. Collective for a DTensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def with_location(key: str, places: Mapping[str, str]) -> str:
    """Returns a key of `ForwardHooks.tensors` with the code that computes the tensor."""
    if not key.startswith(INPUT):
        return f"the output of {key or 'the module'} ({places.get(key, '?')})"
    parent = key.removeprefix(INPUT).rpartition(".")[0]
    while parent and places.get(parent, "ModuleList").startswith(("ModuleList", "ModuleDict")):
        parent = parent.rpartition(".")[0]  # a container runs no code
    return f"{key}: it is computed in {parent or 'the module'} ({places.get(parent, '?')})"
