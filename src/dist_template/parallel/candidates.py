"""The strategies that a machine allows, with the flags that select them. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .mesh_sharding import Mesh
from .plain import Plain
from .zero_sharding import Zero

SCHEDULES = ("", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")  # "": the file's, 1F1B
OFFLOAD = {"offload_optimizer": True}
ZERO: tuple[tuple[str, dict[str, Any]], ...] = (  # file, and options unlike the file's
    ("zero2", {"stage": 1}), ("zero2", {}), ("zero3", {}), ("zero2", OFFLOAD),
    ("zero3", OFFLOAD | {"offload_parameters": True}),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Candidate:
    """A strategy that may be trained with."""

    name: str  # of the sizes above one
    file: str  # in configs/strategy
    options: dict[str, Any]  # arguments unlike the file's
    sharding: Plain
    schedule: str = ""  # of a pipeline, if it is not the file's

    def __str__(self) -> str:
        return f"{self.name}, {self.schedule}" if self.schedule else self.name

    @property
    def flags(self) -> str:
        found = [f"--config configs/strategy/{self.file}.yaml"]
        for key, value in self.options.items():
            found.append(f"--trainer.strategy.{key} {'true' if value is True else value}")
        return " ".join(found)


def candidates(nodes: int, devices: int) -> Iterator[Candidate]:
    """Yields all strategies of `nodes` x `devices` ranks; parallel sizes are powers of two."""
    world, offload = nodes * devices, {"cpu_offload": True}
    yield Candidate("ddp" if world > 1 else "one device", "ddp", {}, Plain())
    for file, options in ZERO:
        sharding = Zero.of({"stage": 2 if file == "zero2" else 3, **options})
        if sharding.offload_optimizer:
            yield Candidate(f"{file}, offload", file, options, sharding)
        elif world > 1:  # one process has nothing to shard
            yield Candidate(f"zero{sharding.stage}", file, options, sharding)
    yield Candidate("fsdp2, offload", "fsdp2", offload, Mesh.of(offload))
    for replicas in sorted({1, nodes}):
        for tp in _powers(devices):
            for ep in _powers(world // replicas):
                if world > 1 and (ep % tp == 0 or ep == 1):
                    yield _of_mesh(1, replicas, world // replicas // tp, tp, ep)
    for pp in _powers(nodes if nodes > 1 else devices)[1:]:
        for replicas in sorted({1, max(1, nodes // pp)}):
            for ep in _powers(world // pp // replicas):
                for schedule in SCHEDULES:
                    yield _of_mesh(pp, replicas, world // pp // replicas, 1, ep, schedule)


def _of_mesh(pp: int, replicas: int, fsdp: int, tp: int, ep: int, schedule: str = "") -> Candidate:
    names = []
    for kind, size in (("pp", pp), ("fsdp2", fsdp), ("tp", tp), ("ep", ep)):
        if kind == "fsdp2" and replicas > 1:
            names.append(f"hsdp {replicas} x {fsdp}")
        elif size > 1:
            names.append(f"{kind} {size}")
    file = "fsdp2"
    if pp > 1:
        file = "pp_fsdp2" if fsdp > 1 else "pp"
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
    options: dict[str, Any] = {}
    for key, size in (("dp_replicate_size", replicas), ("tp_size", tp), ("ep_size", ep), ("pp_size", pp)):
        if size > 1:
            options[key] = size
    if schedule:
        options["pp_schedule"] = schedule
    return Candidate(" x ".join(names), file, options, Mesh.of(options | {"fsdp_size": fsdp}), schedule)


def _powers(limit: int) -> list[int]:
    found, power = [], 1
    while limit % power == 0:
        found.append(power)
        power *= 2
    return found
