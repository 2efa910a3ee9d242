"""The strategies that a machine allows, with the flags that select them. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from . import spec_of
from .base import Spec

__all__ = ["Candidate"]

# "": the file's, 1F1B. GPipe and InterleavedZeroBubble wait as long as 1F1B and DualPipeV, and keep
# more activations.
SCHEDULES = ("", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
OFFLOAD = {"offload_optimizer": True}
ZERO: tuple[tuple[str, str, dict[str, Any]], ...] = (  # name, file, and options unlike the file's
    ("zero1", "zero1", {}),
    ("zero2", "zero2", {}),
    ("zero3", "zero3", {}),
    ("zero2, offload", "zero2", OFFLOAD),
    ("zero3, offload", "zero3", OFFLOAD | {"offload_parameters": True}),
)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A strategy that may be trained with."""

    name: str  # of the sizes above one
    file: str  # of the library's configs/strategy
    options: dict[str, Any]  # arguments unlike the file's
    spec: Spec

    def __str__(self) -> str:
        schedule = self.options.get("pp_schedule")
        return f"{self.name}, {schedule}" if schedule else self.name

    @property
    def flags(self) -> str:
        found = [f"--config strategy/{self.file}"]
        for key, value in self.options.items():
            found.append(f"--trainer.strategy.{key} {'true' if value is True else value}")
        return " ".join(found)

    @classmethod
    def of(cls, nodes: int, devices: int) -> Iterator[Candidate]:
        """Yields all strategies of `nodes` x `devices` ranks, simple ones first; parallel sizes are
        powers of two."""
        world = nodes * devices
        yield cls("ddp" if world > 1 else "one device", "ddp", {}, spec_of("ddp"))
        for replicas in sorted({1, nodes}):
            for tp, ep in product(_powers(devices), _powers(world // replicas)):
                if world > 1 and (ep % tp == 0 or ep == 1):
                    yield _of_sizes(1, replicas, world // replicas // tp, tp, ep)
        for name, file, options in ZERO:
            if world > 1 or options.get("offload_optimizer"):  # one process has nothing to shard
                arguments = {"stage": int(file[-1]), **options}
                yield cls(
                    name,
                    file,
                    options,
                    spec_of({"class_path": "ZeroStrategy", "init_args": arguments}),
                )
        yield _of_mesh("fsdp2, offload", "fsdp2", {"cpu_offload": True})
        for pp in _powers(nodes if nodes > 1 else devices)[1:]:
            for replicas in sorted({1, max(1, nodes // pp)}):
                for ep, schedule in product(_powers(world // pp // replicas), SCHEDULES):
                    yield _of_sizes(pp, replicas, world // pp // replicas, 1, ep, schedule)


def _of_sizes(pp: int, replicas: int, fsdp: int, tp: int, ep: int, schedule: str = "") -> Candidate:
    sizes = {"dp_replicate_size": replicas, "tp_size": tp, "ep_size": ep, "pp_size": pp}
    options: dict[str, Any] = dict(filter(lambda item: item[1] > 1, sizes.items()))
    if schedule:
        options["pp_schedule"] = schedule
    file, names = "fsdp2", list[str]()
    for kind, size in (("pp", pp), ("fsdp2", fsdp), ("tp", tp), ("ep", ep)):
        if kind == "fsdp2" and replicas > 1:
            names.append(f"hsdp {replicas} x {fsdp}")
        elif size > 1:
            names.append(f"{kind} {size}")
    if pp > 1:
        file = "pp" if fsdp == ep == 1 else "pp_fsdp2"
        if ep > 1:
            file = "pp_ep"
    elif replicas > 1:
        file = "hsdp"
    elif fsdp == 1:
        file = "tp"
    elif tp > 1:
        file = "fsdp2_tp"
    elif ep > 1:
        file = "fsdp2_ep"
    return _of_mesh(" x ".join(names), file, options, {"fsdp_size": fsdp})


def _of_mesh(
    name: str, file: str, options: dict[str, Any], of_file: dict[str, Any] | None = None
) -> Candidate:
    arguments = options | (of_file or {})
    return Candidate(
        name, file, options, spec_of({"class_path": "MeshStrategy", "init_args": arguments})
    )


def _powers(limit: int) -> list[int]:
    found, power = [], 1
    while limit % power == 0:
        found.append(power)
        power *= 2
    return found
