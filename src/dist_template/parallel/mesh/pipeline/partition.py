"""Partitions a model into pipeline stages: finds the blocks, the embedding and head, and the blocks
of each stage."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ....errors import InputError
from ...blocks import find_blocks
from ...configured import ARGS
from .stages import (
    LayerSplit,
    StageFacts,
    bounds_between,
    divided,
    stage_facts,
    stages_per_rank,
    wrong_layers,
)


@dataclass(frozen=True)
class ModelParts:
    """A model as a sequence."""

    path: str  # of the blocks
    blocks: nn.ModuleList
    # outermost other modules with parameters that are defined before the blocks
    before: list[nn.Module]
    after: list[nn.Module]  # and after them

    @classmethod
    def of(cls, model: nn.Module) -> ModelParts:
        """Finds the parts of `model`. Raises InputError if it is no sequence of blocks."""
        blocks, path, found = find_blocks(model), "", nn.ModuleList()
        for name, module in model.named_modules():
            # The first list: later ones, as the modules that predict later tokens, run after it.
            if (
                not path
                and isinstance(module, nn.ModuleList)
                and {*module}
                and {*module} <= {*blocks}
            ):
                path, found = name, module
        cannot = f"{type(model).__name__} cannot be a pipeline"
        if not len(found):
            raise InputError(
                f"{cannot}: its blocks are not the items of one nn.ModuleList; or set"
                f" {ARGS}.pp_size to 1"
            )
        owners = [
            module
            for module in model.modules()
            if module is not found and found in module.modules()
        ]
        before: list[nn.Module] = []
        after: list[nn.Module] = []
        for owner, on_path in zip(owners, [*owners[1:], found], strict=True):
            for name, _ in owner.named_parameters(recurse=False):
                why = f"{name} is a parameter of {type(owner).__name__}: give it a module"
                raise InputError(f"{cannot}: {why}; or set {ARGS}.pp_size to 1")
            side = before
            for child in owner.children():
                if child is on_path:
                    side = after
                elif next(child.parameters(), None) is not None:
                    side.append(child)
        return cls(path, found, before, after)


def blocks_of_stages(model: nn.Module, num_stages: int, layers: LayerSplit) -> list[int]:
    """Returns how many blocks each stage gets. `layers` is a number for each; "even"; or "cost":
    the last stage gets fewer, by the weights of the output layer and of a mean block. Raises
    InputError if they do not fit."""
    parts = ModelParts.of(model)
    num, last = len(parts.blocks), 0.0
    if isinstance(layers, list):
        if why := wrong_layers(layers, num_stages, num):
            raise InputError(f"{ARGS}.{why}")
        return layers
    if num_stages > num:
        raise InputError(
            f"{num} blocks cannot be divided into {num_stages} stages (pp_size x stages per rank):"
            f" set {ARGS}.pp_size lower, or another pp_schedule"
        )
    if layers == "cost":
        last = _size(parts.after) * num / max(_size([*parts.blocks]), 1)
    return divided(num, last, num_stages)


def facts_of(
    model: nn.Module, size: int, schedule: str, interleaved: int, layers: LayerSplit
) -> StageFacts:
    """Returns what facts.json has of `model` on `size` ranks. Raises InputError if it cannot be
    divided."""
    per_rank = stages_per_rank(schedule, interleaved)
    counts, parts = blocks_of_stages(model, size * per_rank, layers), ModelParts.of(model)
    parameters, last = [], len(counts) - 1
    for stage, (start, stop) in enumerate(bounds_between(counts)):
        modules = [
            *parts.blocks[start:stop],
            *parts.before * (stage == 0),
            *parts.after * (stage == last),
        ]
        parameters.append(_size(modules))
    return stage_facts(schedule, size, per_rank, counts, parameters)


def _size(modules: list[nn.Module]) -> int:
    return sum(parameter.numel() for parameter in nn.ModuleList(modules).parameters())
