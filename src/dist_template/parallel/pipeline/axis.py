"""The pipeline as an axis of the mesh: what it refuses, keeps and sends. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..axes import Axis, Keys, MeshSizes
from ..facts import ARGS, Configured, Facts, Sent
from .costs import bubble, stages_per_rank


class PipelineAxis(Axis):
    """Each rank has some consecutive blocks."""

    name = "pp"
    has_trial = True

    def share(self, sizes: MeshSizes, mesh: Keys, facts: Facts) -> float:
        return mesh.stages(facts).largest

    def buffers(self, sizes: MeshSizes, mesh: Keys, facts: Facts) -> dict[str, float]:
        """Inside a stage it is ZeRO-1: weights are gathered once per step."""
        if sizes.dp_replicate * sizes.fsdp == 1:
            return {}
        experts = facts.experts if sizes.ep > 1 else 0
        gathered = (facts.parameters - experts) / sizes.tp + experts / sizes.ep
        gathered *= mesh.stages(facts).largest
        trained = facts.trainable / facts.parameters * mesh.weight_bytes(facts)
        return {
            "gathered weights": gathered * mesh.used_bytes(facts),
            "unsharded gradients": gathered * trained,
        }

    def refusals(self, sizes: MeshSizes, mesh: Keys, setup: Configured) -> Iterator[str]:
        per_rank = stages_per_rank(mesh.pp_schedule, mesh.pp_stages_per_rank)
        if per_rank < 1 or (mesh.pp_schedule.startswith("Interleaved") and per_rank < 2):
            yield f"{ARGS}.pp_stages_per_rank {per_rank}: {mesh.pp_schedule} needs 2 or more"
            return
        stages = sizes.pp * per_rank
        yield from self._layers(mesh, setup, stages)
        if setup.trains:
            yield from self._micro_batches(sizes.pp, mesh, setup, stages)
        if mesh.cpu_offload:
            yield f"{ARGS}.cpu_offload true does not work in a pipeline: set it to false"
        if setup.setting("adapter.quantize"):
            null = "set it to null, or pp_size to 1"
            yield f"model.adapter.quantize does not work in a pipeline: {null}"
        if type(getattr(setup.data, "source", None)).__name__ == "Preferences":
            yield (
                "data.source Preferences runs the model twice in a step, which a pipeline cannot"
                f" do: set {ARGS}.pp_size to 1"
            )

    def _layers(self, mesh: Keys, setup: Configured, stages: int) -> Iterator[str]:
        layers, num = mesh.pp_layers, getattr(setup.text_config, "num_hidden_layers", None)
        if isinstance(layers, list):
            total = sum(layers) if num is None else num
            if len(layers) != stages or min(layers, default=0) < 1 or sum(layers) != total:
                of = "" if num is None else f" that sum to {num}"
                yield f"{ARGS}.pp_layers {layers}: give {stages} numbers{of}, or cost, or even"
        elif num is not None and num < stages:
            yield (
                f"the model's {num} blocks cannot be divided into {stages} stages: lower"
                f" {ARGS}.pp_size, or set another pp_schedule"
            )

    def _micro_batches(
        self, size: int, mesh: Keys, setup: Configured, stages: int
    ) -> Iterator[str]:
        rows = getattr(setup.data, "global_batch_size", None)
        micro = getattr(setup.data, "micro_batch_size", None)
        if not rows or not micro:
            return
        num = rows // (micro * mesh.data_parallel(setup.machine.world_size))
        name = mesh.pp_schedule
        least = stages if name in ("1F1B", "DualPipeV") else 1
        is_uneven = name.startswith("Interleaved") and num % max(1, num // size) != 0
        if num >= least and not is_uneven:
            return
        needs, fits = f"{least} or more, one for each stage", least
        if is_uneven:
            needs, fits = f"a multiple of {size}", num - num % size
        share = bubble(name, stages, stages // size, fits)
        yield (
            f"an optimizer step has {num} micro-batches (global_batch_size / micro_batch_size /"
            f" data-parallel ranks), and {name} needs {needs} (with {fits}, a rank"
            f" waits {share:.0%} of the time in which it computes): edit data.micro_batch_size,"
            f" data.global_batch_size or {ARGS}.pp_schedule"
        )

    def trial(self, sizes: MeshSizes, mesh: Keys, model: Any) -> None:
        from .division import try_stages
        from .partition import facts_of

        settings = mesh.pp_schedule, mesh.pp_stages_per_rank, mesh.pp_layers
        try_stages(model, facts_of(model, sizes.pp, *settings))

    def traffic(self, sizes: MeshSizes, mesh: Keys, facts: Facts) -> Iterator[Sent]:
        """Hidden states and their gradients; the gradients of the two copies of a tied weight."""
        stages, p = mesh.stages(facts), sizes.pp
        calls = 2 * stages.crossings * mesh.accumulation(facts) / p
        elements, span = calls * mesh.tokens(facts) * facts.width, facts.world_size // p + 1
        yield Sent("send", elements, mesh.used_bytes(facts), 2, calls, span)
        tied = (stages.mean * p - 1) * facts.parameters
        if tied > 1 / 2:
            elements = 2 / p * tied / sizes.fsdp / sizes.tp
            yield Sent("all_reduce", elements, 4, 2, 2 / p, span)
