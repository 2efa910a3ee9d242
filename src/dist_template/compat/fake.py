"""Tensors without memory, and the bytes that they would take. Verified on torch 2.13.

torch has no public name for FakeTensorMode and TorchDispatchMode; where they are gone, importing
this file raises ImportError. torch's MemTracker adds the gradients of parameters to activations.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .attributes import replaced
from .torch import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are allocated inside, unlike `existing`, and still live."""

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        storages = [tensor.untyped_storage() for tensor in existing]
        self._known: dict[int, Any] = {id(storage): storage for storage in storages}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return

        def free(_: Any) -> None:
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, free)
        self.live += size
        self.peak = max(self.peak, self.live)


@contextmanager
def fake_tensors(on_gpu: bool, fp32: bool) -> Generator[None]:
    """Inside, tensors have no memory, and operations without a fake CPU kernel take as much.

    These are attention on a GPU with heads of two sizes, and experts in fp32.
    """
    from transformers.integrations import moe

    attention, grouped = F.scaled_dot_product_attention, {}

    def padded(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        wider = F.pad(value, (0, query.shape[-1] - value.shape[-1]))
        return attention(query, key, wider, *args, **options)[..., : value.shape[-1]]

    if fp32:
        grouped = {"_grouped_mm": lambda input, weight, offs: input @ weight[0]}
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        replaced(F, scaled_dot_product_attention=padded if on_gpu else attention),
        replaced(moe, **grouped),
    ):
        yield
