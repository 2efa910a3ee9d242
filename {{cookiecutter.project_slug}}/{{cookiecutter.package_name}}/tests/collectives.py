"""Counts what a rank sends in one optimizer step, whoever calls it: torch's reducer in C++, DTensor, DeepSpeed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback

from ..parallel.traffic import Collective

# torch's operators, and which of their arguments is the whole tensor. Functional collectives end in these as well.
OPERATORS = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
}
SMALL = 64  # elements: counts, norms and votes have fewer


class CountCollectives(Callback):
    """Write `sent<rank>.json`: kind -> [calls, elements], of the step after step `step`."""

    def __init__(self, folder: Path, step: int = 2) -> None:
        self.folder = folder
        self.step = step
        self.profile: Any = None

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.step and self.profile is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            self.profile = torch.profiler.profile(activities=activities, record_shapes=True)
            self.profile.start()
        elif trainer.global_step == self.step + 1 and not (self.folder / f"sent{trainer.global_rank}.json").exists():
            self.profile.stop()
            found = json.dumps(_counted(self.profile.events()))
            (self.folder / f"sent{trainer.global_rank}.json").write_text(found, encoding="utf-8")


def _counted(events: Iterable[Any]) -> dict[str, tuple[int, int]]:
    calls, elements = Counter[str](), Counter[str]()
    for event in events:
        if event.name in OPERATORS:
            kind, argument = OPERATORS[event.name]
            shape = event.structured_input_shapes[argument]
            sizes = [prod(each) for each in shape] if shape and isinstance(shape[0], list) else [prod(shape)]
            if sum(sizes) >= SMALL:
                calls[kind] += 1
                elements[kind] += sum(sizes)
    return {kind: (calls[kind], elements[kind]) for kind in calls}


def read_sent(folder: Path) -> dict[str, tuple[float, float]]:
    """Kind -> (calls, elements), the mean over ranks."""
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("sent*.json"))]
    assert ranks and len({tuple(sorted(rank)) for rank in ranks}) == 1, "ranks differ in what they call"
    return {kind: tuple(sum(r[kind][i] for r in ranks) / len(ranks) for i in (0, 1)) for kind in ranks[0]}


def summed(traffic: Iterable[Collective]) -> dict[str, tuple[float, float]]:
    """The same of what the model says."""
    found: dict[str, tuple[float, float]] = {}
    for one in traffic:
        calls, elements = found.get(one.kind, (0, 0))
        found[one.kind] = (calls + one.times, elements + one.times * one.elements)
    return found
