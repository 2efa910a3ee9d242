"""MeshStrategy's pipeline: its schedule, stages and micro-batches, and what it cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...parallel.pipeline.costs import bubble, stages_per_rank
from .machine import ARGS, NOT_READ_YET, Setup


def pipeline(setup: Setup) -> Iterator[str]:
    mesh, strategy = setup.mesh, setup.strategy
    if mesh is None or mesh.pp == 1:
        return
    per_rank = stages_per_rank(strategy.pp_schedule, strategy.pp_stages_per_rank)
    if per_rank < 1 or (strategy.pp_schedule.startswith("Interleaved") and per_rank < 2):
        yield f"{ARGS}.pp_stages_per_rank {per_rank}: {strategy.pp_schedule} needs 2 or more"
        return
    stages = mesh.pp * per_rank
    yield from _layers(setup, stages)
    yield from _micro_batches(setup, mesh, stages)
    if strategy.cpu_offload:
        yield f"{ARGS}.cpu_offload true does not work in a pipeline: set it to false"
    if getattr(getattr(setup.module, "adapter", None), "quantize", None):
        yield "model.adapter.quantize does not work in a pipeline: set it to null, or pp_size to 1"
    if type(getattr(setup.data, "source", None)).__name__ == "Preferences":
        yield (
            "data.source Preferences runs the model twice in a step, which a pipeline cannot do:"
            f" set {ARGS}.pp_size to 1"
        )


def _layers(setup: Setup, stages: int) -> Iterator[str]:
    layers, config = setup.strategy.pp_layers, setup.model_config
    num: Any = None
    if config not in (NOT_READ_YET, None):
        num = getattr(config.get_text_config(), "num_hidden_layers", None)
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


def _micro_batches(setup: Setup, mesh: Any, stages: int) -> Iterator[str]:
    num = accumulation(setup, mesh.data_parallel)
    name = setup.strategy.pp_schedule
    if num is None or not setup.trains:
        return
    least = {"1F1B": stages, "DualPipeV": stages}.get(name, 1)
    is_uneven = name.startswith("Interleaved") and num % max(1, num // mesh.pp)
    if num < least or is_uneven:
        needs = f"a multiple of {mesh.pp}" if is_uneven else f"{least} or more, one for each stage"
        fits = num - num % mesh.pp if is_uneven else least
        share = bubble(name, stages, stages // mesh.pp, fits)
        yield (
            f"an optimizer step has {num} micro-batches (global_batch_size / micro_batch_size /"
            f" data-parallel ranks), and {name} needs {needs} (with {fits}, a rank"
            f" waits {share:.0%} of the time in which it computes): edit data.micro_batch_size,"
            f" data.global_batch_size or {ARGS}.pp_schedule"
        )


def accumulation(setup: Setup, data_parallel: int) -> int | None:
    """Returns the micro-batches of an optimizer step; None if the configuration does not say."""
    rows, micro = (getattr(setup.data, n, None) for n in ("global_batch_size", "micro_batch_size"))
    if rows and micro:
        return rows // (micro * data_parallel)
    return None
