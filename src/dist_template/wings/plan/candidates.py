"""The strategies that a model and a machine allow, with the flags that select them.

Each is checked as `fit` checks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...cli.limits import mesh, pipeline, proven, training, zero
from ...cli.limits.machine import Setup
from ...errors import InputError
from ...parallel.mesh import MeshStrategy
from ...parallel.zero import ZeroStrategy

CHECKS = (
    training.architecture, training.precision, training.blocks, mesh.sizes, mesh.plans, mesh.heads,
    mesh.experts, mesh.optimizer, zero.zero, proven.refused,
)  # fmt: skip
OFFLOAD: dict[str, Any] = {"offload_optimizer": True}
SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
OFFLOADED = ((2, OFFLOAD), (3, OFFLOAD | {"offload_parameters": True}))  # also of one process
ZERO = ((1, {}), (2, {}), (3, {}), *OFFLOADED)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A strategy: name, file in configs/strategy, options unlike the file's, class, arguments."""

    name: str
    file: str
    options: dict[str, Any]
    kind: Any = None
    arguments: Any = None

    @property
    def flags(self) -> str:
        options = {k: str(v).lower() if v is True else v for k, v in self.options.items()}
        values = [f"--trainer.strategy.{key} {value}" for key, value in options.items()]
        return " ".join([f"--config configs/strategy/{self.file}.yaml", *values])

    @property
    def tp(self) -> int:
        return (self.arguments or {}).get("tp_size", 1)

    @property
    def pp(self) -> int:
        return (self.arguments or {}).get("pp_size", 1)

    @property
    def schedule(self) -> str:
        return (self.arguments or {}).get("pp_schedule", "")

    @property
    def sizes(self) -> str:
        """Returns its name without the schedule."""
        return self.name.removesuffix(f", {self.schedule}")

    @property
    def complexity(self) -> int:
        """Returns how many kinds of sharding it combines; DeepSpeed, another engine, is two."""
        given = self.arguments or {}
        sizes = [size for key, size in given.items() if key.endswith("_size")]
        engine = 2 * ("stage" in given) + (self.schedule not in ("", SCHEDULES[0]))
        offload = 2 * any("offload" in key for key in given)
        return engine + sum(size > 1 for size in sizes) + offload

    @property
    def spec(self) -> Any:
        """Returns trainer.strategy."""
        name, arguments = getattr(self.kind, "__name__", ""), self.arguments
        return {"class_path": name, "init_args": arguments} if name else self.file

    def refusal(self, setup: Setup, traced: Any) -> str:
        """Returns why `fit` would refuse it; "" if it would not."""
        try:
            strategy = self.kind(**self.arguments) if self.kind else self.file
            setup = replace(setup, trainer={**setup.trainer, "strategy": strategy})
            if self.pp > 1:
                traced.pipeline(self.pp, self.schedule)
            found = [why for check in CHECKS for why in check(setup)]
            found += pipeline.pipeline(replace(setup, trains=False))  # of any micro-batches
            return next(iter(found), "")
        except InputError as error:  # deepspeed is not installed, too few blocks
            return str(error)


def candidates(nodes: int, devices: int) -> Iterator[Candidate]:
    """Yields all strategies of `nodes` x `devices` ranks; parallel sizes are powers of two."""
    world, offload = nodes * devices, {"cpu_offload": True}
    yield Candidate("ddp" if world > 1 else "one device", "ddp", {})
    for stage, options in ZERO if world > 1 else OFFLOADED:
        given = options | ({"stage": 1} if stage == 1 else {})
        name, file = f"zero{stage}{', offload' if options else ''}", f"zero{max(stage, 2)}"
        yield Candidate(name, file, given, ZeroStrategy, given | {"stage": stage})
    yield Candidate("fsdp2, offload", "fsdp2", offload, MeshStrategy, offload)
    for replicas in sorted({1, nodes}) if world > 1 else ():
        for tp in _powers(devices):
            for ep in _powers(world // replicas):
                if ep % tp == 0 or ep == 1:
                    yield _of_mesh(replicas, world // replicas // tp, tp, ep)
    for pp in _powers(nodes if nodes > 1 else devices)[1:]:
        for replicas in sorted({1, max(1, nodes // pp)}):
            for ep in _powers(world // pp // replicas):
                for schedule in SCHEDULES:
                    yield _of_mesh(replicas, world // pp // replicas, 1, ep, pp, schedule)


def _of_mesh(
    replicas: int, fsdp: int, tp: int, ep: int, pp: int = 1, schedule: str = SCHEDULES[0]
) -> Candidate:
    sizes: dict[str, Any] = {"dp_replicate_size": replicas, "tp_size": tp, "ep_size": ep}
    sizes |= {"pp_size": pp} if pp > 1 else {}
    file = "tp" if fsdp == 1 else "fsdp2_tp" if tp > 1 else "fsdp2_ep" if ep > 1 else "fsdp2"
    outer = f"hsdp {replicas} x {fsdp}" if replicas > 1 else f"fsdp2 {fsdp}" if fsdp > 1 else ""
    stages = f"pp {pp}" * (pp > 1)
    name = " x ".join(filter(None, [stages, outer, f"tp {tp}" * (tp > 1), f"ep {ep}" * (ep > 1)]))
    options = {key: size for key, size in sizes.items() if size > 1}
    if schedule != SCHEDULES[0]:  # of configs/strategy/pp*.yaml
        name, options = f"{name}, {schedule}", options | {"pp_schedule": schedule}
    sizes |= {"pp_schedule": schedule} if pp > 1 else {}
    file = "hsdp" if replicas > 1 else file
    if pp > 1:
        file = "pp_ep" if ep > 1 else "pp_fsdp2" if fsdp > 1 else "pp"
    return Candidate(name, file, options, MeshStrategy, sizes | {"fsdp_size": fsdp})


def _powers(limit: int) -> list[int]:
    return [2**n for n in range(limit.bit_length()) if limit % 2**n == 0]
