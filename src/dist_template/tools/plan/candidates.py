"""The strategies that a model and a machine allow, with the flags that select them.

Each is checked as `fit` checks it. Pipelines are added here when the library has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...cli.limits import mesh, training, zero
from ...cli.limits.machine import Setup
from ...errors import InputError
from ...parallel.mesh import MeshStrategy
from ...parallel.zero import ZeroStrategy

CHECKS = (
    training.precision, training.blocks, training.architecture, mesh.sizes, mesh.plans, mesh.heads,
    mesh.experts, mesh.optimizer, zero.zero,
)  # fmt: skip
OFFLOAD: dict[str, Any] = {"offload_optimizer": True}
ZERO: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {},
    "zero2, offload": OFFLOAD,
    "zero3": {},
    "zero3, offload": OFFLOAD | {"offload_parameters": True},
}


@dataclass(frozen=True)
class Candidate:
    """A strategy: its name, its file in configs/strategy, and what differs from that file."""

    name: str
    file: str
    options: dict[str, Any]

    @property
    def flags(self) -> str:
        values = [f"--trainer.strategy.{k} {str(v).lower()}" for k, v in self.options.items()]
        return " ".join([f"--config configs/strategy/{self.file}.yaml", *values])

    @property
    def spec(self) -> Any:
        """Returns trainer.strategy."""
        if self.file == "ddp":
            return "ddp"
        if self.file in ("zero2", "zero3"):
            return {"class_path": "ZeroStrategy", "init_args": {"stage": int(self.file[-1])}
                    | self.options}  # fmt: skip
        fsdp = {"fsdp_size": 1} if self.file == "tp" else {}
        return {"class_path": "MeshStrategy", "init_args": fsdp | self.options}

    def refusal(self, setup: Setup) -> str:
        """Returns why `fit` would refuse it; "" if it would not."""
        classes: dict[str, Any] = {"MeshStrategy": MeshStrategy, "ZeroStrategy": ZeroStrategy}
        try:
            strategy = self.spec
            if isinstance(strategy, dict):
                strategy = classes[strategy["class_path"]](**strategy["init_args"])
            setup = replace(setup, trainer={**setup.trainer, "strategy": strategy})
            return next((why for check in CHECKS for why in check(setup)), "")
        except InputError as error:  # deepspeed is not installed
            return str(error)


def candidates(nodes: int, devices: int) -> Iterator[Candidate]:
    """Yields all strategies of `nodes` x `devices` ranks; parallel sizes are powers of two."""
    world = nodes * devices
    yield Candidate("ddp" if world > 1 else "one device", "ddp", {})
    for name, options in ZERO.items():
        yield Candidate(name, "zero3" if name[4] == "3" else "zero2", options)
    yield Candidate("fsdp2, offload", "fsdp2", {"cpu_offload": True})
    for replicas in sorted({1, nodes}) if world > 1 else ():
        for tp in _powers(devices):
            fsdp = world // replicas // tp
            for ep in [1, *(ep for ep in _powers(fsdp * tp)[1:] if ep % tp == 0)]:
                yield _of_mesh(replicas, fsdp, tp, ep)


def _of_mesh(replicas: int, fsdp: int, tp: int, ep: int) -> Candidate:
    sizes = {"dp_replicate_size": replicas, "tp_size": tp, "ep_size": ep}
    file = "tp" if fsdp == 1 < tp else "fsdp2_tp" if tp > 1 else "fsdp2_ep" if ep > 1 else "fsdp2"
    outer = f"hsdp {replicas} x {fsdp}" if replicas > 1 else f"fsdp2 {fsdp}" if fsdp > 1 else ""
    name = " x ".join(filter(None, [outer, f"tp {tp}" * (tp > 1), f"ep {ep}" * (ep > 1)]))
    options = {key: size for key, size in sizes.items() if size > 1}
    return Candidate(name, "hsdp" if replicas > 1 else file, options)


def _powers(limit: int) -> list[int]:
    return [2**n for n in range(limit.bit_length()) if limit % 2**n == 0]
