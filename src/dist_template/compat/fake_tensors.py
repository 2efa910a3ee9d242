"""Private names of torch for tensors without memory, by which `plan` estimates. Verified on torch
2.13; tests/compat/test_names.py checks them. Where a name is gone: AttributeError or
ImportError."""

import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from . import replaced


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are allocated inside, unlike `existing`, and still live.
    torch's MemTracker adds the gradients of parameters to activations."""

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = WeakIdKeyDictionary({tensor.untyped_storage(): 0 for tensor in existing})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known[storage] = size = storage.nbytes()
                weakref.finalize(storage, self._add, -size)
                self._add(size)
        return result

    def _add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


@contextmanager
def fake_tensors(on_gpu: bool, fp32: bool) -> Generator[None]:
    """Inside, tensors have no memory. Operations without a fake kernel on a CPU take as much as
    others: attention on a GPU whose heads have two sizes, and experts in fp32."""
    from transformers.integrations import moe

    attention = F.scaled_dot_product_attention
    experts: dict[str, Any] = {"_grouped_mm": lambda x, weight, offs: (x[None] @ weight[:1])[0]}

    def padded(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        size, more = value.shape[-1], query.shape[-1] - value.shape[-1]
        if more:
            value = F.pad(value, (0, more))
        return attention(query, key, value, *args, **options)[..., :size]

    fused = replaced(F, scaled_dot_product_attention=padded if on_gpu else attention)
    grouped = replaced(moe, **experts if fp32 else {})
    with FakeTensorMode(allow_non_fake_inputs=True), fused, grouped:
        yield
