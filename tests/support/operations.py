"""What torch does in a test: its operations, and the memory that it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


class Ops(TorchDispatchMode):
    """Counts torch's operations, and notes each that makes the host wait for the device: it reads a
    number, or needs one for a shape."""

    WAITING = (
        "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount",
        "equal",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.seen[name] += 1
        self.reads += [name] if name in self.WAITING else []
        return func(*args, **(kwargs or {}))


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most that torch's tensors held at once, kernels' own included, beyond what there was."""
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events, most = list(profiler.profiler.kineto_results.experimental_event_tree()), 0
    while events:
        event = events.pop()
        events += event.children
        if event.tag.name == "Allocation":
            most = max(most, event.extra_fields.total_allocated)
    return most
