"""One strategy's memory, messages and time: diagnosis' estimate with traced activations.

What is sent follows the formulas of docs/strategies; tests/wings/test_plan.py compares them with
the collectives that the benchmarks count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...observe.history.run import History
from ..diagnose.memory import LIVE_PARAMETERS, Estimate
from ..diagnose.rules.resources import FULL
from .candidates import Candidate
from .trace import Traced

FRAGMENTATION = 0.1  # of activations, logits and buffers
CONTEXT = 1.5e9  # bytes of CUDA's context, kernels, cuBLAS and NCCL
RECOMPUTED = {"none": 1.0, "selective": 1.05, "full": 4 / 3}  # operations of a step
HOST = 25e9  # bytes per second between a device and its host
UPDATED = 5e8  # parameters per second that a device's share of the host's cores updates
STATE = ("weights", "gradients", "optimizer state")
COLUMNS = (*STATE, "activations", "logits", "backward", "buffers", "allowance")


@dataclass(frozen=True)
class Machine:
    """Nodes, devices per node, bytes of a device; per second of one: operations that it reaches,
    its peak, bytes sent within a node and to other nodes."""

    nodes: int
    devices: int
    memory: float
    flops: float
    peak: float
    within: float
    between: float


class Planned(Estimate):
    """A strategy's memory on one device and the time of a step."""

    def __init__(
        self, history: History, traced: Traced, machine: Machine, candidate: Candidate
    ) -> None:
        super().__init__(history)
        self._traced, self.machine, self.candidate = traced, machine, candidate
        self.wide = 2 if self.is_half else self.weight_bytes  # bytes of a weight that is used

    def parts(self) -> dict[str, float]:
        """Returns `COLUMNS`; logits and backward are not in memory at the same time."""
        sharded = self.kind == "mesh" and self.shards > self.tp
        half = self.is_half and (sharded or self.weight_bytes == 2)
        casts = self.precision.endswith("-mixed") and self.kind != "zero"
        rows, mode = self.micro_batch_size, self.checkpointing
        kept, most = self._traced.activations(rows, half, casts, self.tp, mode)
        state = self.state()
        buffers = sum(size for name, size in state.items() if name not in STATE)
        one_block = sharded and self.pp == 1  # of a pipeline, a whole stage's are buffers
        reduced = self.block() * (self.wide + self.weight_bytes) if one_block else 0
        in_chunks = self.loss_chunk and self.loss_chunk < self.tokens
        sums = in_chunks and self.trainable == self.parameters  # gradients of the output layer
        of_head = 4 * self.vocab_size * self.width if sums else 0
        logits, backward = self.logits() + of_head, most - kept + reduced
        if self.pp > 1:  # the rank of the last stage keeps less than the one that keeps most
            kept *= self.layers_kept / self.layers
            logits = max(0.0, logits - kept * (1 - self.in_flight_at_end / self.in_flight))
        moving = kept + max(logits, backward) + buffers
        sizes = [kept, logits, backward, buffers, CONTEXT + FRAGMENTATION * moving]
        return dict(zip(COLUMNS, [*(state[name] for name in STATE), *sizes], strict=True))

    def total(self) -> float:
        parts = self.parts()
        return sum(parts.values()) - min(parts["logits"], parts["backward"])

    @property
    def is_allowed(self) -> bool:
        """Whether `fit` accepts the checkpointing, and the schedule has enough micro-batches."""
        m, p, mode, schedule = self.accumulation, self.pp, self.checkpointing, self.schedule
        if schedule in ("ZBVZeroBubble", "DualPipeV"):
            # With checkpointing a block is recomputed twice.
            return mode == "none" and m >= p * (2 if schedule == "DualPipeV" else 1.5)
        has_recompute = mode != "selective" or not (self.stage == 3 or self.ep > 1)
        return has_recompute and m >= p and not (schedule == "Interleaved1F1B" and m % p)

    @property
    def fits(self) -> bool:
        """Whether the share of the device's memory is left that diagnosis asks for."""
        return self.total() <= FULL * self.machine.memory

    @property
    def order(self) -> Any:
        """What fits comes first, then the fastest (times of equal three digits are a tie), the
        simplest strategy, what sends least, and what recomputes least."""
        if not self.fits:
            return 1, self.total()
        sent, took = sum(size for size, *_ in self.sent()), float(f"{self.seconds():.3g}")
        rows, recomputed = self.micro_batch_size, RECOMPUTED[self.checkpointing]
        return 0, took, self.candidate.complexity, sent, recomputed, -rows

    def sent(self) -> Iterator[tuple[float, int, bool]]:
        """Yields bytes that a device sends in an optimizer step, the neighbours that they reach,
        and whether computation waits for them."""
        n, times, w, trained = self.ranks, self.accumulation, self.weight_bytes, self.trainable
        if self.kind == "replicated":
            yield 2 * w * trained * _ring(n), n, False
        elif self.kind == "zero" and self.stage < 3:
            yield (2 * (times if self.stage > 1 else 1) + 1) * w * trained * _ring(n), n, False
        elif self.kind == "zero":
            gathers = 1 if self.parameters < LIVE_PARAMETERS else 2
            yield times * w * (gathers * self.parameters + trained) * _ring(n), n, False
        else:
            yield from self._sent_by_mesh()

    def _sent_by_mesh(self) -> Iterator[tuple[float, int, bool]]:
        """FSDP2 keeps norm and head gathered; experts of expert parallelism are other units."""
        fsdp, share = self.shards // self.tp, self.trainable / self.parameters
        mean = self.mean_share / self.share  # of the stages of a pipeline, over the largest
        experts = self.fact("parameters.experts") / self.ep / self.pp if self.ep > 1 else 0
        dense = self.part() * mean * self.parameters * fsdp - experts * self.ep / self.tp
        once = self.pp > 1
        reduces = 1 if self.accumulates_full or once else self.accumulation
        gathers = 1 if once else 2 * self.accumulation
        head = 0 if once else self.accumulation * self.vocab_size * self.width / self.tp
        for number, ranks, less in ((dense, fsdp, head), (experts, self.shards // self.ep, 0)):
            gathered = self.wide * (gathers * number - less)
            reduced = reduces * self.weight_bytes * number * share
            yield (gathered + reduced) * _ring(ranks), self.shards, False
        replicas, own = self.ranks * self.cp // fsdp, self.part() * mean * self.trainable
        yield 2 * self.weight_bytes * own * _ring(replicas), replicas * self.shards, False
        bytes_ = self.accumulation * self.tokens * self.wide
        if self.pp > 1:  # hidden states and their gradients; gradients of tied weights, in fp32
            passed = 2 * bytes_ * self.width * self.crossings
            tied = self.mean_share * self.pp * self.parameters - self.parameters
            of_stage = self.machine.nodes * self.machine.devices // self.pp
            yield (passed + 2 * 4 * tied / self.shards) / self.pp, of_stage + 1, False
        blocks, chosen = self.fact("model.moe_layers"), self.fact("model.experts_per_token")
        if self.tp > 1:
            widths = 2 * self.fact("model.tp_widths") + self.vocab_size
            again = blocks * (2 * self.width + chosen) if self.ep > 1 else 0
            yield bytes_ * (widths + again) / self.pp * _ring(self.tp), self.tp, True
        exchanged = 8 * self.layers * self.width / self.tp / self.pp  # less with grouped heads
        yield bytes_ * exchanged * _ring(self.cp), self.cp, True
        moved = 4 * blocks * chosen * self.width / self.tp / self.pp
        yield bytes_ * moved * _ring(self.ep), self.ep, True

    def seconds(self) -> float:
        """Returns the time of an optimizer step, 0 if a device's speed is not known. What no
        computation waits for is hidden behind it."""
        if not self.machine.flops:
            return 0.0
        compute = self._operations() * RECOMPUTED[self.checkpointing] / self.machine.flops
        hidden = exposed = 0.0
        for sent, span, waits in self.sent():
            is_near = span <= self.machine.devices
            took = sent / (self.machine.within if is_near else self.machine.between)
            hidden, exposed = hidden + took * (not waits), exposed + took * waits
        bubble = (self._history.fact("pipeline.bubble") or 0.0) / self.accumulation
        slowest = self.layers_kept / self.in_flight * self.pp / self.layers
        compute *= (1 + bubble) * slowest
        part = 1 / self.ranks if self.kind == "zero" else self.part()
        if self.offload_optimizer:  # gradients to the host, weights back
            exposed += self.trainable * part * (2 * self.weight_bytes / HOST + 1 / UPDATED)
        if self.offload_parameters:
            exposed += 2 * self.accumulation * self.wide * self.parameters * part / HOST
        return max(compute, hidden) + exposed

    def mfu(self) -> float:
        return self._operations() / self.seconds() / self.machine.peak if self.seconds() else 0.0

    def _operations(self) -> float:
        """Returns the model's operations of a step on one device."""
        tokens = self.rows * self.ranks * self.seq_len
        devices = self.machine.nodes * self.machine.devices
        return tokens / devices * self.fact("model.flops_per_token")


def _ring(ranks: float) -> float:
    return (ranks - 1) / ranks
