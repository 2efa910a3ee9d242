"""MeshStrategy's configuration: sizes, refusals, memory and messages from its axes, and its reduced
form. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from math import prod
from typing import Any, ClassVar

from ..errors import InputError
from .axes import (
    Axis,
    ExpertAxis,
    Keys,
    MeshSizes,
    ReplicaAxis,
    SequenceAxis,
    ShardAxis,
    Size,
    TensorAxis,
)
from .facts import ARGS, STATE, BlockRun, Configured, Facts, Saving, Sent, Small
from .pipeline.axis import PipelineAxis
from .pipeline.costs import SPLIT_BACKWARD, V_SHAPED, Stages, stages_of, stages_per_rank
from .plain import SLOWER

# Outermost first. A package adds an axis of its own here, and gives its size as dict_kwargs.
AXES: list[Axis] = [
    PipelineAxis(), ReplicaAxis(), ShardAxis(), TensorAxis(), ExpertAxis(), SequenceAxis(),
]  # fmt: skip
NUM_PROCESSES = (1, 2, 4)  # of a rehearsal


@dataclass(frozen=True)
class Mesh(Keys):
    """Shards a model over a mesh of ranks."""

    is_replicated: ClassVar[bool] = False
    precisions: ClassVar[tuple[str, ...]] = ("32-true", "bf16-mixed", "bf16-true", "16-true")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Mesh:
        """Returns the sharding of MeshStrategy's arguments."""
        known = {each.name for each in fields(cls)} - {"arguments", "name", "bases"}
        return cls(arguments, **{key: arguments[key] for key in known & arguments.keys()})

    # ---- ranks -----------------------------------------------------------------------------------

    def given(self, axis: Axis) -> Size:
        return self.arguments.get(axis.key, axis.default)

    def sizes(self, world_size: int) -> MeshSizes:
        """Returns the sizes on `world_size` ranks, with "auto" resolved.

        Raises:
            InputError: their product is not the number of ranks, more than one is "auto", or
                cp_size does not divide fsdp_size.
        """
        adding = [axis for axis in AXES if axis.adds_ranks]
        sizes = MeshSizes({a.name: size for a in adding if (size := self.given(a)) != "auto"})
        automatic = [axis.name for axis in adding if axis.name not in sizes]
        if len(automatic) == 1:
            sizes[automatic[0]] = world_size // max(1, prod(sizes.values()))
        if len(automatic) > 1 or min(sizes.values()) < 1 or prod(sizes.values()) != world_size:
            product = " x ".join(f"{axis.key} {self.given(axis)}" for axis in adding)
            raise InputError(
                f"{product} does not make {world_size}, the number of processes (trainer.devices x"
                " trainer.num_nodes); edit strategy.init_args, where only one size can be auto"
            )
        for axis in AXES:
            if not axis.adds_ranks:
                sizes[axis.name] = axis.resolved(self.given(axis), sizes)
        return sizes

    def data_parallel(self, world_size: int) -> int:
        sizes = self.sizes(world_size)
        return prod(sizes[axis.name] for axis in AXES if axis.reads_its_own_rows) // sizes.cp

    def axes(self, world_size: int) -> list[str]:
        sizes = self.sizes(world_size)
        found = [name for name in ("fsdp", "tp", "ep", "cp", "pp") if sizes[name] > 1]
        found += [a.name for a in self._active(sizes) if a.is_proven and a.name not in found]
        if sizes.pp > 1 and self.pp_schedule in SPLIT_BACKWARD:
            found.append("zb")
        return found or super().axes(world_size)

    def _active(self, sizes: MeshSizes) -> list[Axis]:
        return [axis for axis in AXES if sizes[axis.name] > 1]

    @property
    def complexity(self) -> int:
        sizes = [self.given(axis) for axis in AXES]
        combined = sum(size != "auto" and size > 1 for size in sizes)
        return combined + (self.pp_schedule != "1F1B") + 2 * self.cpu_offload

    # ---- before a start --------------------------------------------------------------------------

    def refusals(self, setup: Configured) -> Iterator[str]:
        yield from super().refusals(setup)
        for axis in AXES:
            if (size := self.given(axis)) != "auto" and size < 1 and axis.name != "cp":
                given = f"{ARGS}.{axis.key} {size}"
                yield f"{given} is not a number of processes: set 1 or more, or auto"
                return
        try:
            sizes = self.sizes(setup.machine.world_size)
        except InputError as error:
            yield str(error)
            return
        if self.cpu_offload and sizes.tp > 1 and sizes.dp_replicate * sizes.fsdp // sizes.cp == 1:
            yield (
                f"{ARGS}.cpu_offload true needs parameters that FSDP shards, but fsdp_size x"
                " dp_replicate_size is 1: set it to false, or fsdp_size to 2 or more"
            )
        # A model's plans come first, then its stages.
        for axis in sorted(self._active(sizes), key=lambda axis: axis.name == "pp"):
            yield from axis.refusals(sizes, self, setup)
        if setup.optimizer.get("class_path") == "torch.optim.Adafactor":
            # torch 2.13: "in-place operations that require placement changes are not supported"
            yield (
                "--optimizer Adafactor: torch's fails on sharded matrices, whose rows it reads: use"
                " configs/strategy/ddp.yaml, or another optimizer"
            )

    def trials(self, setup: Configured) -> Iterator[tuple[str, Callable[[Any], None]]]:
        sizes = self.sizes(setup.machine.world_size)
        for axis in self._active(sizes):
            if axis.has_trial:
                yield f"{axis.key} {sizes[axis.name]}", partial(axis.trial, sizes, self)

    # ---- memory ----------------------------------------------------------------------------------

    def share(self, facts: Facts) -> float:
        sizes = self.sizes(facts.world_size)
        return prod(axis.share(sizes, self, facts) for axis in self._active(sizes))

    def stages(self, facts: Facts) -> Stages:
        """Returns the stages that a run recorded, or `plan` made; those of one stage if none."""
        if not facts.pipeline.get("stages") or self.sizes(facts.world_size).pp == 1:
            return Stages(blocks=facts.layers)
        return stages_of(facts.pipeline, facts.parameters, self.accumulation(facts))

    def tokens(self, facts: Facts) -> int:
        return super().tokens(facts) // self.sizes(facts.world_size).cp

    def block_run(self, facts: Facts) -> BlockRun:
        sizes = self.sizes(facts.world_size)
        is_half = facts.is_half and (sizes.fsdp > 1 or facts.stores_half)
        return BlockRun(is_half, facts.is_mixed, sizes.tp)

    def state(self, facts: Facts) -> dict[str, float]:
        offloaded = self.cpu_offload and not facts.on_host
        return super().state(facts) | (dict.fromkeys(STATE, 0.0) if offloaded else {})

    def buffers(self, facts: Facts) -> dict[str, float]:
        sizes, parts = self.sizes(facts.world_size), dict[str, float]()
        for axis in self._active(sizes):
            parts |= axis.buffers(sizes, self, facts)
        return parts

    def memory(self, facts: Facts) -> dict[str, float]:
        """Traced, the block whose gradients are reduced is counted, and that the last stage's rank,
        which alone has logits, keeps fewer micro-batches than the rank that keeps most."""
        parts, sizes = super().memory(facts), self.sizes(facts.world_size)
        if facts.traced is not None and sizes.pp > 1:
            stages = self.stages(facts)
            parts["activations"] *= self.layers_kept(facts) / facts.layers
            fewer = parts["activations"] * (1 - stages.kept_at_end / stages.kept)
            parts["logits"] = max(0.0, parts["logits"] - fewer)
        elif facts.traced is not None and sizes.fsdp > 1:
            width = self.used_bytes(facts) + self.weight_bytes(facts)
            parts["backward"] += self.block(facts) * width
        return parts

    def layers_kept(self, facts: Facts) -> float:
        stages = self.stages(facts)
        return stages.kept * stages.blocks

    def savings(self, facts: Facts) -> Iterator[Saving]:
        if not self.reduce_each_micro_batch:
            key = f"{ARGS}.reduce_each_micro_batch"
            sentence = (
                "Gradients reduced in every micro-batch: more communication, same loss curve."
            )
            yield Saving(sentence, {key: (False, True)})
        if self.sizes(facts.world_size).fsdp > 1 and not self.cpu_offload:
            sentence = f"Parameters, gradients and optimizer state in host memory: {SLOWER}"
            yield Saving(sentence, {f"{ARGS}.cpu_offload": (False, True)}, is_on_host=True)

    # ---- messages and time -----------------------------------------------------------------------

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        sizes = self.sizes(facts.world_size)
        for axis in self._active(sizes):
            yield from axis.traffic(sizes, self, facts)

    def allows(self, facts: Facts) -> bool:
        """A schedule with split backward passes recomputes a checkpointed block twice."""
        sizes, m, mode = self.sizes(facts.world_size), self.accumulation(facts), facts.checkpointing
        if sizes.pp > 1 and self.pp_schedule in V_SHAPED:
            least = 2 if self.pp_schedule == "DualPipeV" else 3 / 2
            return mode == "none" and m >= least * sizes.pp
        if mode == "selective" and sizes.ep > 1 or m < sizes.pp:
            return False
        return sizes.pp == 1 or self.pp_schedule != "Interleaved1F1B" or m % sizes.pp == 0

    def stage_facts(self, model: Any, world_size: int) -> dict[str, Any]:
        if (pp := self.sizes(world_size).pp) == 1:
            return {}
        from .pipeline.partition import facts_of

        settings = self.pp_schedule, self.pp_stages_per_rank, self.pp_layers
        return facts_of(model, pp, *settings)

    def slowdown(self, facts: Facts) -> float:
        stages, pp = self.stages(facts), self.sizes(facts.world_size).pp
        waits = facts.pipeline.get("bubble", 0.0) / self.accumulation(facts)
        return (1 + waits) * stages.blocks * pp / facts.layers

    def on_host(self, facts: Facts) -> tuple[float, float]:
        share = self.share(facts) * self.cpu_offload
        return facts.trainable * share, facts.parameters * share

    # ---- fewer processes -------------------------------------------------------------------------

    def shrunk(self, processes: int | None) -> Small:
        """Sets the smallest sizes that keep each kind of parallelism."""
        choices = [axis.small(self.given(axis), self) for axis in AXES]
        keys = [axis.key for axis in AXES]
        for sizes in itertools.product(*choices):
            small = self._with(dict(zip(keys, sizes, strict=True)))
            for num in (processes,) if processes else NUM_PROCESSES:
                if self._is_kept(small, num):
                    return self._small(small, num)
        num = processes or NUM_PROCESSES[-1]
        small = self._with({axis.key: sizes[0] for axis, sizes in zip(AXES, choices, strict=True)})
        small.sizes(num)  # raises if the number does not fit
        return self._small(small, num)

    def _with(self, sizes: dict[str, Size]) -> Mesh:
        return replace(self, arguments={**self.arguments, **sizes})

    def _is_kept(self, small: Mesh, num: int) -> bool:
        """Returns whether the small sizes fit, and keep what is above 1."""
        try:
            sizes = small.sizes(num)
        except InputError:
            return False
        for axis in AXES:
            is_one = small.given(axis) == "auto" and axis.adds_ranks and sizes[axis.name] == 1
            if is_one or not axis.is_kept(self, sizes):
                return False
        return True

    def _small(self, small: Mesh, num: int) -> Small:
        dropped = [a for a in AXES if small.given(a) == 1 != self.given(a)]
        notes = [f"{axis.key} is 1: the mesh would need 8 processes" for axis in dropped]
        arguments, stages = dict(small.arguments), 1
        if small.sizes(num).pp > 1:
            interleaved = min(self.pp_stages_per_rank, 2)
            arguments["pp_stages_per_rank"] = interleaved
            stages = 2 * stages_per_rank(self.pp_schedule, interleaved)
            if isinstance(self.pp_layers, list):
                arguments["pp_layers"] = "even"
                notes.append("pp_layers is even: the small model has fewer blocks")
        return Small(arguments, num, small.data_parallel(num), stages, notes)

    def halved(self, processes: int) -> Small:
        num, sizes = super().halved(processes).processes, self.sizes(processes)
        rows = [axis for axis in AXES if axis.adds_ranks and axis.reads_its_own_rows]
        others = [axis for axis in reversed(AXES) if axis.adds_ranks and axis not in rows]
        axis = next(axis for axis in (*rows, *others) if sizes[axis.name] > 1)
        changed: dict[str, Size] = {}
        if (given := self.given(axis)) != "auto":  # auto adapts
            changed[axis.key] = given // 2
        sizes = self._with({"cp_size": 1, "ep_size": 1} | changed).sizes(num)
        for axis in AXES:
            if not axis.adds_ranks:
                changed[axis.key] = axis.fitted(self.given(axis), sizes)
        half = self._with(changed)
        return Small(dict(half.arguments), num, half.data_parallel(num))
