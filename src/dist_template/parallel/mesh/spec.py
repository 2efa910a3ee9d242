"""MeshStrategy's configuration: its axes say what they refuse, need and send (axes/); here they are
put together. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from ...errors import InputError, reason
from ..configured import ARGS, Configured
from ..own_code import code_of
from ..spec.base import SLOWER, ReducedStrategy, Spec
from ..spec.facts import STATE, BlockRun, Facts, Saving, Sent
from .axes import AXES, all_axes
from .axes.axis import Axis, MeshSizes, Size
from .axes.pipeline import PipelineAxis
from .pipeline.stages import StageFacts
from .sizes import data_parallel_size, given_size, sequence_parts, sizes_of

MOST = 4  # processes of a rehearsal


@dataclass(frozen=True)
class MeshSpec(Spec):
    """Shards a model over a mesh of ranks; `arguments` has the sizes, by `Axis.key`."""

    name: str = "MeshStrategy"

    precisions: ClassVar[tuple[str, ...]] = ("32-true", "bf16-mixed", "bf16-true", "16-true")

    @staticmethod
    def strategy_class() -> type:
        from .strategy import MeshStrategy

        return MeshStrategy

    @staticmethod
    def format_class() -> type:
        from .format import ShardedFormat

        return ShardedFormat

    @property
    def offloads(self) -> bool:
        """Whether parameters, gradients and optimizer state are in host memory."""
        return self.arguments.get("cpu_offload", False)

    # ---- ranks -----------------------------------------------------------------------------------

    def sizes(self, world_size: int) -> MeshSizes:
        """Returns the sizes on `world_size` ranks. Raises InputError if they do not fit."""
        return sizes_of(self.arguments, world_size)

    def active(self, world_size: int) -> list[Axis]:
        """Returns the axes that have a size above 1, outermost first."""
        sizes = self.sizes(world_size)
        return [self._axis(axis, sizes) for axis in all_axes() if sizes[axis.name] > 1]

    def _axis(self, kind: type[Axis], sizes: MeshSizes) -> Axis:
        """Creates an axis. Raises InputError if a package's refuses its size."""
        try:
            return kind(self, sizes)
        except Exception as error:
            if kind in AXES or isinstance(error, InputError):
                raise
            why = f"{type(error).__name__}: {reason(error)}"
            raise InputError(f"{ARGS}.{kind.key}: {kind.__name__} refuses it: {why}") from error

    def in_order(self, world_size: int) -> list[Axis]:
        """Returns the same in the order in which refusals and proof.json have them."""
        return sorted(self.active(world_size), key=lambda axis: axis.comes_last)

    def data_parallel(self, world_size: int) -> int:
        return data_parallel_size(self.sizes(world_size))

    def rows_together(self, world_size: int, micro_batch_size: int) -> int:
        """A pipeline needs several micro-batches in a step."""
        least = prod(axis.least_micro_batches() for axis in self.active(world_size))
        return least * super().rows_together(world_size, micro_batch_size)

    def why_not_manual(self, world_size: int) -> str:
        sizes = self.sizes(world_size)
        axes = [axis for axis in self.active(world_size) if not axis.allows_manual]
        return ", ".join(f"{axis.key} {sizes[axis.name]}" for axis in axes)

    def expert_parts(self, world_size: int) -> int:
        """Tensor parallelism divides each expert, unless expert parallelism distributes them."""
        sizes = self.sizes(world_size)
        return sizes.tp if sizes.ep == 1 else 1

    def axes(self, world_size: int) -> list[str]:
        found = [axis.name for axis in self.in_order(world_size) if axis.is_proven]
        return found or super().axes(world_size)

    def reduced(self, processes: int | None = None) -> ReducedStrategy:
        """Reduces sizes above 1 to 2; if that needs too many processes, data parallelism becomes 1
        first, and then others."""
        arguments, notes = dict(self.arguments), list[str]()
        # An axis of a package that the configuration does not name stays unnamed.
        named = [axis for axis in all_axes() if axis in AXES or axis.key in arguments]
        adding = [axis for axis in named if axis.adds_ranks]
        sizes: dict[str, Size] = {}
        for axis in adding:
            sizes[axis.key] = given_size(arguments, axis)
            if sizes[axis.key] not in (1, "auto"):
                sizes[axis.key] = 2
        data_first = sorted(
            reversed(adding), key=lambda axis: (not axis.reads_own_rows, axis.default == "auto")
        )
        for axis in data_first:
            key = axis.key
            if _ranks(sizes) > (processes or MOST) and sizes[key] != 1:
                sizes[key] = 1
                notes.append(f"{key} is 1: the mesh would need more processes")
        num = processes or _ranks(sizes)
        arguments |= sizes | {axis.key: 1 for axis in named if not axis.adds_ranks}
        resolved = sizes_of(arguments, num)  # raises if the number does not fit
        for axis in named:
            arguments |= self._axis(axis, resolved).reduced(notes)
        small = MeshSpec(arguments)
        stages = 1
        if resolved.pp > 1:
            stages = resolved.pp * PipelineAxis(small, resolved).stages_per_rank
        return ReducedStrategy(arguments, num, small.data_parallel(num), stages, notes)

    # ---- refusals --------------------------------------------------------------------------------

    def refusals(self, setup: Configured) -> Iterator[str]:
        yield from super().refusals(setup)
        code = code_of(type(setup.module))
        if setup.trains and code is not None and "grad_norm" in code.calls:
            yield (
                f"{type(setup.module).__name__} calls grad_norm, and Lightning's (2.6.6) cannot"
                f" read the sharded gradients of {self.name}: remove the call; the norm is logged"
                " as train/grad_norm anyway"
            )
        world_size = setup.machine.world_size
        try:
            sizes = self.sizes(world_size)
        except InputError as error:
            yield str(error)
            return
        if self.offloads and sizes.tp > 1 and self.data_parallel(world_size) == 1:
            why = "needs parameters that FSDP shards, but fsdp_size x dp_replicate_size is 1"
            way_out = f"set it to false, or {ARGS}.fsdp_size to 2 or more"
            yield f"{ARGS}.cpu_offload true {why}: {way_out}"
        for axis in self.in_order(world_size):
            yield from axis.refusals(setup)

    # ---- memory ----------------------------------------------------------------------------------

    def stage_facts(self, model: Any, world_size: int) -> StageFacts | None:
        sizes = self.sizes(world_size)
        return PipelineAxis(self, sizes).stage_facts(model) if sizes.pp > 1 else None

    def share(self, facts: Facts) -> float:
        return prod(axis.share(facts) for axis in self.active(facts.world_size))

    def mean_share(self, facts: Facts) -> float:
        return prod(axis.mean_share(facts) for axis in self.active(facts.world_size))

    def tokens(self, facts: Facts) -> int:
        return super().tokens(facts) // sequence_parts(self.sizes(facts.world_size))

    def block_run(self, facts: Facts) -> BlockRun:
        sizes = self.sizes(facts.world_size)
        is_half = facts.is_half and (sizes.fsdp > 1 or facts.stores_half)
        return BlockRun(is_half, facts.is_mixed, sizes.tp)

    def state(self, facts: Facts) -> dict[str, float]:
        parts = super().state(facts)
        if self.offloads and not facts.on_host:
            parts |= dict.fromkeys(STATE, 0.0)
        return parts

    def buffers(self, facts: Facts) -> dict[str, float]:
        parts: dict[str, float] = {}
        for axis in self.active(facts.world_size):
            parts |= axis.buffers(facts)
        return parts

    def memory(self, facts: Facts) -> dict[str, float]:
        parts = super().memory(facts)
        if facts.traced is not None:
            for axis in self.active(facts.world_size):
                axis.correct_traced(parts, facts)
        return parts

    def layers_kept(self, facts: Facts) -> float:
        kept = prod(axis.kept_share(facts) for axis in self.active(facts.world_size))
        return kept * facts.layers

    def savings(self, facts: Facts) -> Iterator[Saving]:
        if not self.arguments.get("reduce_each_micro_batch", True):
            key = f"{ARGS}.reduce_each_micro_batch"
            sentence = (
                "Gradients reduced in every micro-batch: more communication, same loss curve."
            )
            yield Saving(sentence, {key: (False, True)})
        if self.sizes(facts.world_size).fsdp > 1 and not self.offloads:
            sentence = f"Parameters, gradients and optimizer state in host memory: {SLOWER}"
            yield Saving(sentence, {f"{ARGS}.cpu_offload": (False, True)}, is_on_host=True)

    # ---- messages and time -----------------------------------------------------------------------

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        for axis in self.active(facts.world_size):
            yield from axis.traffic(facts)

    def allows(self, facts: Facts) -> bool:
        return all(axis.allows(facts) for axis in self.active(facts.world_size))

    def slowdown(self, facts: Facts) -> float:
        return prod(axis.slowdown(facts) for axis in self.active(facts.world_size))

    def on_host(self, facts: Facts) -> tuple[float, float]:
        share = self.share(facts) * self.offloads
        return facts.trainable * share, facts.parameters * share


def _ranks(sizes: dict[str, Size]) -> int:
    return prod(2 if size == "auto" else size for size in sizes.values())
