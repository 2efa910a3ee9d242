"""MeshStrategy's configuration: an axis of the mesh is one class, and `Mesh` multiplies, chains and
shrinks what the axes say. No torch.

    dense parameters    (pp, dp_replicate, fsdp, tp)
    experts             (pp, dp_replicate, efsdp, ep),  efsdp = fsdp x tp / ep
    sequences           cp neighbours along fsdp share each sequence
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..errors import InputError
from .facts import ARGS, STATE, BlockRun, Configured, Facts, Saving, Sent, Small
from .pipeline import costs
from .plain import SLOWER, Plain

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

Size = int | Literal["auto"]
NUM_PROCESSES = (1, 2, 4)  # of a rehearsal
AXES: list[type[Axis]] = []  # outermost first; axes.py fills it, and a package adds its own


class MeshSizes(dict[str, int]):
    """Ranks along each axis, by its name: `sizes.tp` is `sizes["tp"]`."""

    pp: int
    dp_replicate: int
    fsdp: int
    tp: int
    ep: int
    cp: int

    def __getattr__(self, name: str) -> int:
        return self[name]


class Axis:
    """A dimension of a mesh, of a size above 1."""

    name = key = ""  # of the dimension; of its size, NAME_size
    default: Size = 1
    adds_ranks = True  # whether its size is a factor of the number of ranks
    reads_own_rows = False  # whether ranks that differ only here read different batches
    draws_own = True  # whether they have random streams of their own (dropout)
    is_proven = True  # whether proof.json has it; replicas compute what one process computes
    has_trial = False  # whether `trial` runs a rank's part of a model

    def __init_subclass__(cls) -> None:
        cls.key = f"{cls.name}_size"

    def __init__(self, mesh: Mesh, sizes: MeshSizes) -> None:
        self.mesh, self.sizes, self.size = mesh, sizes, sizes[self.name]

    def share(self, facts: Facts) -> float:
        """Returns the share of the parameters that a rank stores."""
        return 1.0

    def buffers(self, facts: Facts) -> dict[str, float]:
        """Returns bytes of a rank besides its shards, by part."""
        return {}

    def refusals(self, setup: Configured) -> Iterator[str]:
        return iter(())

    def trial(self, model: PreTrainedModel) -> None:
        """Runs a rank's part of `model` on the meta device; raises what a training would."""

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        return iter(())

    @classmethod
    def resolved(cls, given: Size, sizes: MeshSizes) -> int:
        """Returns the size of an axis that adds no ranks. Raises InputError if it does not fit the other `sizes`."""
        raise NotImplementedError

    @classmethod
    def small(cls, given: Size, mesh: Mesh) -> list[Size]:
        """Returns the sizes for a rehearsal, the best first: 2 for what is above 1."""
        return [given if given in (1, "auto") else 2]

    @classmethod
    def is_kept(cls, mesh: Mesh, small: MeshSizes) -> bool:
        """Returns whether `small` has the kinds of parallelism that `mesh` has along this axis."""
        return True

    @classmethod
    def fitted(cls, given: Size, sizes: MeshSizes) -> Size:
        """Returns the size of an axis that adds no ranks, on fewer ranks; `sizes` are theirs."""
        return given


@dataclass(frozen=True)
class Mesh(Plain):
    """Shards a model over a mesh of ranks; `arguments` has the sizes, by `Axis.key`."""

    name: str = "MeshStrategy"
    pp_schedule: costs.Schedule = "1F1B"
    pp_stages_per_rank: int = 2
    pp_layers: costs.Layers = "cost"
    tp_plan: dict[str, str] | None = None
    ep_plan: dict[str, str] | None = None
    cpu_offload: bool = False
    reduce_each_micro_batch: bool = True

    is_replicated: ClassVar[bool] = False
    precisions: ClassVar[tuple[str, ...]] = ("32-true", "bf16-mixed", "bf16-true", "16-true")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Mesh:
        """Returns the sharding of MeshStrategy's arguments."""
        _, _, _, *options = fields(cls)  # arguments, name, bases
        return cls(arguments, **{each.name: arguments.get(each.name, each.default) for each in options})

    # ---- ranks -----------------------------------------------------------------------------------

    def given(self, axis: type[Axis]) -> Size:
        return self.arguments.get(axis.key, axis.default)

    def sizes(self, world_size: int) -> MeshSizes:
        """Returns the sizes on `world_size` ranks, with "auto" resolved.

        Raises:
            InputError: their product is not the number of ranks, more than one is "auto", or
                cp_size does not divide fsdp_size.
        """
        sizes, adding = MeshSizes(), [axis for axis in AXES if axis.adds_ranks]
        for axis in adding:
            if (size := self.given(axis)) != "auto":
                sizes[axis.name] = size
        automatic = [axis.name for axis in adding if axis.name not in sizes]
        if len(automatic) == 1:
            sizes[automatic[0]] = world_size // max(1, prod(sizes.values()))
        if len(automatic) > 1 or min(sizes.values()) < 1 or prod(sizes.values()) != world_size:
            product = " x ".join(f"{axis.key} {self.given(axis)}" for axis in adding)
            processes = f"{world_size}, the number of processes (trainer.devices x trainer.num_nodes)"
            way_out = "edit strategy.init_args, where only one size can be auto"
            raise InputError(f"{product} does not make {processes}; {way_out}")
        for axis in AXES:
            if not axis.adds_ranks:
                sizes[axis.name] = axis.resolved(self.given(axis), sizes)
        return sizes

    def active(self, world_size: int) -> list[Axis]:
        """Returns the axes that have a size above 1."""
        sizes = self.sizes(world_size)
        return [axis(self, sizes) for axis in AXES if sizes[axis.name] > 1]

    def data_parallel(self, world_size: int) -> int:
        sizes = self.sizes(world_size)
        return prod(sizes[axis.name] for axis in AXES if axis.reads_own_rows) // sizes.cp

    def axes(self, world_size: int) -> list[str]:
        found = []
        for axis in self.active(world_size):
            if axis.is_proven:
                found.append(axis.name)
        if "pp" in found:  # proof.json has it after the others
            found.append(found.pop(0))
            if self.pp_schedule in costs.SPLIT_BACKWARD:
                found.append("zb")
        return found or super().axes(world_size)

    @property
    def complexity(self) -> int:
        combined = (self.pp_schedule != "1F1B") + 2 * self.cpu_offload
        for axis in AXES:
            combined += self.given(axis) not in (1, "auto")
        return combined

    # ---- before a start --------------------------------------------------------------------------

    def refusals(self, setup: Configured) -> Iterator[str]:
        yield from super().refusals(setup)
        for axis in AXES:
            if (size := self.given(axis)) != "auto" and size < 1 and axis.name != "cp":
                yield f"{ARGS}.{axis.key} {size} is not a number of processes: set 1 or more, or auto"
                return
        world_size = setup.machine.world_size
        try:
            sizes = self.sizes(world_size)
        except InputError as error:
            yield str(error)
            return
        if self.cpu_offload and sizes.tp > 1 and self.data_parallel(world_size) == 1:
            why = "needs parameters that FSDP shards, but fsdp_size x dp_replicate_size is 1"
            yield f"{ARGS}.cpu_offload true {why}: set it to false, or fsdp_size to 2 or more"
        # A model's plans come first, then its stages.
        for axis in sorted(self.active(world_size), key=lambda axis: axis.name == "pp"):
            yield from axis.refusals(setup)
        if setup.optimizer.get("class_path") == "torch.optim.Adafactor":
            # torch 2.13: "in-place operations that require placement changes are not supported"
            way_out = "use configs/strategy/ddp.yaml, or another optimizer"
            yield f"--optimizer Adafactor: torch's fails on sharded matrices, whose rows it reads: {way_out}"

    def trials(self, setup: Configured) -> Iterator[tuple[str, Callable[[PreTrainedModel], None]]]:
        for axis in self.active(setup.machine.world_size):
            if axis.has_trial:
                yield f"{axis.key} {axis.size}", axis.trial

    def rules(self, model: PreTrainedModel, sizes: MeshSizes) -> dict[str, str]:
        """Returns the plans of `model`, built, with the user's changes."""
        rules = {**model.tp_plan, **(self.tp_plan or {})}
        if sizes.ep > 1:
            rules |= {**model.ep_plan, **(self.ep_plan or {})}
        return rules

    def stage_facts(self, model: nn.Module, world_size: int) -> costs.StageFacts | None:
        pp = self.sizes(world_size).pp
        return self.facts_of(model, pp) if pp > 1 else None

    def facts_of(self, model: nn.Module, pp: int) -> costs.StageFacts:
        from .pipeline.partition import facts_of

        return facts_of(model, pp, self.pp_schedule, self.pp_stages_per_rank, self.pp_layers)

    # ---- memory ----------------------------------------------------------------------------------

    def share(self, facts: Facts) -> float:
        return prod(axis.share(facts) for axis in self.active(facts.world_size))

    def stages(self, facts: Facts) -> costs.Stages:
        """Returns the stages that a run recorded, or `plan` made; those of one stage if none."""
        if not facts.pipeline or self.sizes(facts.world_size).pp == 1:
            return costs.Stages(blocks=facts.layers)
        return costs.stages_of(facts.pipeline, facts.parameters, self.accumulation(facts))

    def tokens(self, facts: Facts) -> int:
        return super().tokens(facts) // self.sizes(facts.world_size).cp

    def block_run(self, facts: Facts) -> BlockRun:
        sizes = self.sizes(facts.world_size)
        is_half = facts.is_half and (sizes.fsdp > 1 or facts.stores_half)
        return BlockRun(is_half, facts.is_mixed, sizes.tp)

    def block(self, facts: Facts) -> float:
        """Returns the parameters of the largest block, gathered by FSDP2: other ranks' experts of
        expert parallelism are not."""
        sizes, experts = self.sizes(facts.world_size), facts.block_experts
        largest = facts.block or (facts.parameters - facts.embedding) / facts.layers
        if sizes.ep > 1:
            return (largest - experts) / sizes.tp + experts / sizes.ep
        return largest / sizes.tp

    def state(self, facts: Facts) -> dict[str, float]:
        offloaded = self.cpu_offload and not facts.on_host
        return super().state(facts) | dict.fromkeys(STATE * offloaded, 0.0)

    def buffers(self, facts: Facts) -> dict[str, float]:
        parts: dict[str, float] = {}
        for axis in self.active(facts.world_size):
            parts |= axis.buffers(facts)
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
            sentence = "Gradients reduced in every micro-batch: more communication, same loss curve."
            yield Saving(sentence, {key: (False, True)})
        if self.sizes(facts.world_size).fsdp > 1 and not self.cpu_offload:
            sentence = f"Parameters, gradients and optimizer state in host memory: {SLOWER}"
            yield Saving(sentence, {f"{ARGS}.cpu_offload": (False, True)}, is_on_host=True)

    # ---- messages and time -----------------------------------------------------------------------

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        for axis in self.active(facts.world_size):
            yield from axis.traffic(facts)

    def mean_share(self, facts: Facts) -> float:
        """Returns the mean over ranks of the share of the parameters that a rank stores."""
        stages = self.stages(facts)
        return self.share(facts) * stages.mean / stages.largest

    def allows(self, facts: Facts) -> bool:
        """A schedule with split backward passes recomputes a checkpointed block twice."""
        sizes, m, mode = self.sizes(facts.world_size), self.accumulation(facts), facts.checkpointing
        if sizes.pp > 1 and self.pp_schedule in costs.V_SHAPED:
            least = 2 if self.pp_schedule == "DualPipeV" else 3 / 2
            return mode == "none" and m >= least * sizes.pp
        if mode == "selective" and sizes.ep > 1 or m < sizes.pp:
            return False
        return sizes.pp == 1 or self.pp_schedule != "Interleaved1F1B" or m % sizes.pp == 0

    def slowdown(self, facts: Facts) -> float:
        stages, pp = self.stages(facts), self.sizes(facts.world_size).pp
        waits = facts.pipeline["bubble"] / self.accumulation(facts) if facts.pipeline else 0.0
        return (1 + waits) * stages.blocks * pp / facts.layers

    def on_host(self, facts: Facts) -> tuple[float, float]:
        share = self.share(facts) * self.cpu_offload
        return facts.trainable * share, facts.parameters * share

    # ---- fewer processes -------------------------------------------------------------------------

    def shrunk(self, processes: int | None) -> Small:
        """Sets the smallest sizes that keep each kind of parallelism."""
        keys = [axis.key for axis in AXES]
        choices = [axis.small(self.given(axis), self) for axis in AXES]
        every = [self._with(dict(zip(keys, sizes, strict=True))) for sizes in itertools.product(*choices)]
        for small in every:
            for num in (processes,) if processes else NUM_PROCESSES:
                if self._is_kept(small, num):
                    return self._small(small, num)
        small, num = every[0], processes or NUM_PROCESSES[-1]
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
        arguments, stages, notes = dict(small.arguments), 1, []
        for axis in AXES:
            if small.given(axis) == 1 != self.given(axis):
                notes.append(f"{axis.key} is 1: the mesh would need 8 processes")
        if small.sizes(num).pp > 1:
            interleaved = min(self.pp_stages_per_rank, 2)
            arguments["pp_stages_per_rank"] = interleaved
            stages = 2 * costs.stages_per_rank(self.pp_schedule, interleaved)
            if isinstance(self.pp_layers, list):
                arguments["pp_layers"] = "even"
                notes.append("pp_layers is even: the small model has fewer blocks")
        return Small(arguments, num, small.data_parallel(num), stages, notes)

    def halved(self, processes: int) -> Small:
        num, sizes = super().halved(processes).processes, self.sizes(processes)
        adding = [axis for axis in reversed(AXES) if axis.adds_ranks and sizes[axis.name] > 1]
        rows = [axis for axis in reversed(adding) if axis.reads_own_rows]
        axis, changed = (rows + adding)[0], dict[str, Size]()
        if (given := self.given(axis)) != "auto":  # auto adapts
            changed[axis.key] = given // 2
        sizes = self._with({"cp_size": 1, "ep_size": 1} | changed).sizes(num)
        for axis in AXES:
            if not axis.adds_ranks:
                changed[axis.key] = axis.fitted(self.given(axis), sizes)
        half = self._with(changed)
        return Small(dict(half.arguments), num, half.data_parallel(num))
