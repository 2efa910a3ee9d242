"""One strategy's memory and time on a machine, by the strategy's own formulas and traced
activations; tests/wings/test_plan.py compares them with trainings.

planner.py makes a `Planned` for each strategy. `parts` asks the strategy for the bytes of each part
of its memory, `total` adds up those that are in memory at the same time, `seconds` adds the times
of computation and of traffic, and `order` ranks a strategy among the others by them."""

from dataclasses import dataclass
from typing import Any

from ...parallel.spec.candidates import Candidate
from ...parallel.spec.facts import Facts

FULL = 0.95  # of the device memory: the rest is needed for fragmentation and a longer batch
FRAGMENTATION = 0.1  # of activations, logits and buffers
CONTEXT = 1.5e9  # bytes of CUDA's context, kernels, cuBLAS and NCCL
RECOMPUTED = {"none": 1.0, "selective": 1.05, "full": 4 / 3}  # operations of a step
HOST = 25e9  # bytes per second between a device and its host
UPDATED = 5e8  # parameters per second that a device's share of the host's cores updates
MOVING = ("activations", "logits", "backward")  # the last two are not in memory at the same time


@dataclass(frozen=True)
class Machine:
    """Nodes, devices per node, bytes of a device; per second of one: operations that it reaches,
    bytes sent within a node and to other nodes."""

    nodes: int
    devices: int
    memory: float
    flops: float
    within: float
    between: float


@dataclass
class Planned:
    """A strategy's memory on one device and the time of a step, for a model of `facts`."""

    candidate: Candidate
    machine: Machine
    facts: Facts
    flops_per_token: float
    frozen_flops_per_token: float = 0.0  # of a reference's or a teacher's forward pass

    def __post_init__(self) -> None:
        self.spec = self.candidate.spec

    def parts(self) -> dict[str, float]:
        """Returns STATE, MOVING, buffers and the allowance for what is not counted."""
        memory = self.spec.memory(self.facts)
        parts: dict[str, float] = {}
        for name in self.spec.STATE + MOVING:
            parts[name] = memory[name]
        buffers = sum(size for name, size in memory.items() if name not in parts)
        moving = parts["activations"] + max(parts["logits"], parts["backward"])
        parts["buffers"] = buffers
        parts["allowance"] = CONTEXT + FRAGMENTATION * (moving + buffers)
        return parts

    def total(self) -> float:
        """Returns the bytes at the peak. Logits and backward are never in memory at the same time:
        the larger of the two counts."""
        parts = self.parts()
        return sum(parts.values()) - min(parts["logits"], parts["backward"])

    @property
    def is_allowed(self) -> bool:
        return self.spec.allows(self.facts)

    @property
    def fits(self) -> bool:
        """Whether the share of the device's memory is left that diagnosis asks for."""
        return self.total() <= FULL * self.machine.memory

    @property
    def order(self) -> Any:
        """Sort key: fitting first, then time (three digits), recomputation; within a strategy, the
        micro-batch."""
        if not self.fits:
            return 1, self.total()
        step_s = float(f"{self.seconds():.3g}")
        return 0, step_s, RECOMPUTED[self.facts.checkpointing], -self.facts.micro_batch_size

    def sent(self) -> float:
        """Returns the bytes that a device sends in an optimizer step."""
        return sum(message.sent for message in self.spec.traffic(self.facts))

    def seconds(self) -> float:
        """Returns the time of an optimizer step. Traffic that no computation waits for is hidden
        behind it: of the two, the longer one counts."""
        facts, spec = self.facts, self.spec
        tokens = facts.global_batch_size * facts.seq_len / facts.world_size
        trained = self.flops_per_token * RECOMPUTED[facts.checkpointing]
        compute = tokens * (trained + self.frozen_flops_per_token) / self.machine.flops
        compute *= spec.slowdown(facts)
        hidden = exposed = 0.0
        for message in spec.traffic(facts):
            speed = self.machine.between
            if message.span <= self.machine.devices:
                speed = self.machine.within
            if message.waits:
                exposed += message.sent / speed
            else:
                hidden += message.sent / speed
        # Parameters that the host updates: their gradients go to the host, their weights back.
        updated, fetched = spec.on_host(facts)
        exposed += updated * (2 * spec.weight_bytes(facts) / HOST + 1 / UPDATED)
        fetches = 2 * spec.accumulation(facts) * spec.used_bytes(facts)
        return max(compute, hidden) + exposed + fetches * fetched / HOST
