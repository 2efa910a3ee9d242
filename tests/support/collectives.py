"""Counts what a rank sends in one optimizer step, whoever calls it: torch's reducer in C++,
DTensor, DeepSpeed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_template.parallel.estimates import facts

# torch's operators, in place and functional, and which of their arguments is the whole tensor.
OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "all_reduce": ("all_reduce", 0),
    "all_gather_into_tensor": (
        "all_gather",
        0,
    ),  # a part of it: times the number of ranks, its second argument
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
}
SMALL = 64  # elements: counts, norms and votes have fewer


class ToGroups(TorchDispatchMode):
    """Has `take` see what this thread hands to process groups; a CPU's backward runs in it too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it becomes what is sent
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.take(func._overloadpacket.__name__, args, kwargs)
        return func(*args, **(kwargs or {}))

    def take(self, name: str, args: Any, kwargs: Any) -> None:
        """`name`: torch's operator."""
        raise NotImplementedError


class Sent(ToGroups):
    """Elements by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = Counter[str]()

    def take(self, name: str, args: Any, kwargs: Any) -> None:
        if name in OPERATORS:
            kind, argument = OPERATORS[name]
            size = sum(
                each.numel() for each in tree_leaves(args[argument]) if isinstance(each, Tensor)
            )
            size *= args[1] if name == "all_gather_into_tensor" else 1
            if size >= SMALL:
                self.elements[kind] += size


class CountCollectives(Callback):
    """Write `sent<rank>.json`, kind -> elements, of the step after `step`."""

    def __init__(self, folder: Path, step: int = 2) -> None:
        self.folder = folder
        self.step = step
        self.sent: Sent | None = None

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.step and self.sent is None:
            self.sent = Sent()
            self.sent.__enter__()
        elif trainer.global_step == self.step + 1 and self.sent:
            self.sent.__exit__(None, None, None)
            found, self.sent = self.sent.elements, None
            (self.folder / f"sent{trainer.global_rank}.json").write_text(
                json.dumps(found), encoding="utf-8"
            )


def read_sent(folder: Path) -> dict[str, float]:
    """Kind -> elements, the mean over ranks."""
    ranks = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("sent*.json"))
    ]
    assert ranks and len({tuple(sorted(rank)) for rank in ranks}) == 1, (
        "ranks differ in what they call"
    )
    return {kind: sum(rank[kind] for rank in ranks) / len(ranks) for kind in ranks[0]}


def summed(traffic: Iterable[facts.Sent]) -> dict[str, float]:
    """The same of what the model says."""
    found: dict[str, float] = {}
    for one in traffic:
        if one.ranks > 1:
            found[one.kind] = found.get(one.kind, 0) + one.elements
    return found
