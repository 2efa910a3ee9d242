"""Records inputs and outputs of every module in a forward pass, and finds the code of modules."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ..values import short

INPUT = "the input of "
EXPERTS = ".experts."  # inside, the order and number of tokens differ between strategies


class ForwardHooks:
    """Forward hooks on all modules of `root`.

    tensors    {"the input of NAME": first tensor argument, "NAME": first output tensor},
               unsharded, on the host, in execution order
    choose     returns the dictionary that a pass writes; None: skip it. Default: `tensors`"""

    def __init__(
        self, root: nn.Module, choose: Callable[[], dict[str, Tensor] | None] | None = None
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._choose = choose
        self._handles: list[RemovableHandle] = []
        for name, module in root.named_modules():
            enter, leave = partial(self._enter, INPUT + name), partial(self._leave, name)
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(leave))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, key: str, module: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                self._record(key, value)
                return

    def _leave(self, key: str, module: nn.Module, args: tuple, output: object) -> None:
        if isinstance(output, tuple) and output:
            output = output[0]
        self._record(key, getattr(output, "logits", output))

    def _record(self, key: str, tensor: object) -> None:
        """Keeps the first value: recomputation of activations runs a module again."""
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return
        tensors: dict[str, Tensor] | None = self.tensors
        if self._choose:
            tensors = self._choose()
        if tensors is not None and key not in tensors:
            tensors[key] = full(tensor)


def full(tensor: Tensor) -> Tensor:
    """Returns the unsharded tensor on the host. Collective for a DTensor."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.cpu().clone()


# ---- code ------------------------------------------------------------------------------------


def location(code: object) -> str:
    """Returns file:line of a function, method or class; "" for None and for code in C."""
    code = inspect.unwrap(getattr(code, "__func__", code))  # ty: ignore[invalid-argument-type]
    try:
        file = inspect.getsourcefile(code) or ""
        _, line = inspect.getsourcelines(code)
    except (OSError, TypeError):
        return ""
    return f"{short(file)}:{line}"


def with_location(key: str, places: Mapping[str, str]) -> str:
    """Returns a key of `ForwardHooks.tensors` with the code that computes the tensor."""
    if not key.startswith(INPUT):
        return f"the output of {key or 'the module'} ({places.get(key, '?')})"
    parent = key.removeprefix(INPUT).rpartition(".")[0]
    # A container runs no code: its parent calls the modules in it.
    while parent and places.get(parent, "ModuleList").startswith(("ModuleList", "ModuleDict")):
        parent = parent.rpartition(".")[0]
    return f"{key}: it is computed in {parent or 'the module'} ({places.get(parent, '?')})"
