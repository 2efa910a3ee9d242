"""The strategies that a machine allows, with the flags that select them. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .mesh_sharding import Mesh
from .plain import Plain
from .zero_sharding import Zero

SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
OFFLOADED = (
    (2, {"offload_optimizer": True}),
    (3, {"offload_optimizer": True, "offload_parameters": True}),
)
ZERO = ((1, {}), (2, {}), (3, {}), *OFFLOADED)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A strategy that may be trained with.

    Args:
        name: Of the sizes above one.
        file: In configs/strategy.
        options: Arguments unlike the file's.
        sharding: Its answers.
        schedule: Of a pipeline, if it is not the file's; the rest of the name.
    """

    name: str
    file: str
    options: dict[str, Any]
    sharding: Plain
    schedule: str = ""

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
    for stage, options in ZERO if world > 1 else OFFLOADED:  # one process has nothing to shard
        name = f"zero{stage}, offload" if options else f"zero{stage}"
        given = {"stage": 1} if stage == 1 else options
        file = "zero3" if stage == 3 else "zero2"
        yield Candidate(name, file, given, Zero.of({"stage": stage, **options}))
    yield Candidate("fsdp2, offload", "fsdp2", offload, Mesh.of(offload))
    for replicas in sorted({1, nodes}) if world > 1 else ():
        for tp in _powers(devices):
            for ep in _powers(world // replicas):
                if ep % tp == 0 or ep == 1:
                    yield _of_mesh(1, replicas, world // replicas // tp, tp, ep)
    for pp in _powers(nodes if nodes > 1 else devices)[1:]:
        for replicas in sorted({1, max(1, nodes // pp)}):
            for ep in _powers(world // pp // replicas):
                for schedule in SCHEDULES:
                    fsdp = world // pp // replicas
                    yield _of_mesh(pp, replicas, fsdp, 1, ep, schedule)


def _of_mesh(pp: int, replicas: int, fsdp: int, tp: int, ep: int, schedule: str = SCHEDULES[0]) -> Candidate:
    sizes: dict[str, Any] = {"dp_replicate_size": replicas, "tp_size": tp, "ep_size": ep}
    sizes |= {"pp_size": pp} if pp > 1 else {}
    options = {key: size for key, size in sizes.items() if size > 1}
    kinds = {"pp": pp, "fsdp2": fsdp, "tp": tp, "ep": ep}
    if replicas > 1:
        kinds = {"pp": pp, f"hsdp {replicas} x": fsdp, "tp": tp, "ep": ep}
    name = " x ".join(f"{kind} {size}" for kind, size in kinds.items() if size > 1 or "hsdp" in kind)
    if pp > 1:
        sizes["pp_schedule"] = schedule
        file = "pp_ep" if ep > 1 else "pp_fsdp2" if fsdp > 1 else "pp"
    elif replicas > 1:
        file = "hsdp"
    else:
        file = "tp" if fsdp == 1 else "fsdp2_tp" if tp > 1 else "fsdp2_ep" if ep > 1 else "fsdp2"
    other = ""
    if schedule != SCHEDULES[0]:  # of configs/strategy/pp*.yaml
        other = options["pp_schedule"] = schedule
    return Candidate(name, file, options, Mesh.of(sizes | {"fsdp_size": fsdp}), other)


def _powers(limit: int) -> list[int]:
    return [2**n for n in range(limit.bit_length()) if limit % 2**n == 0]
