"""Partitions a model into pipeline stages: finds the blocks, the embedding and head, and the blocks of each stage."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn

from torch import nn

from ...errors import InputError
from ..blocks import find_blocks
from .costs import Layers, StageFacts, balanced, bubble, stages_of_rank, stages_per_rank


@dataclass(frozen=True)
class ModelParts:
    """A model as a sequence."""

    owner: nn.Module  # that has the list of blocks
    name: str  # of the list there
    before: list[nn.Module]  # outermost other modules with parameters that are defined before the blocks
    after: list[nn.Module]  # and after them

    @property
    def blocks(self) -> nn.ModuleList:
        return getattr(self.owner, self.name)

    @classmethod
    def of(cls, model: nn.Module) -> ModelParts:
        """Finds the parts of `model`.

        Raises:
            InputError: it is no sequence of blocks.
        """
        blocks, found = find_blocks(model), nn.ModuleList()
        for module in model.modules():
            if blocks and isinstance(module, nn.ModuleList) and [*module] == blocks:
                found = module
        if not len(found):
            _refuse(model, "its blocks are not the items of one nn.ModuleList")
        owners = [module for module in model.modules() if module is not found and found in module.modules()]
        before: list[nn.Module] = []
        after: list[nn.Module] = []
        for owner, on_path in zip(owners, [*owners[1:], found], strict=True):
            for name, _ in owner.named_parameters(recurse=False):
                why = f"{name} is a parameter of {type(owner).__name__}: give it a module"
                _refuse(model, why)
            side = before
            for child in owner.children():
                if child is on_path:
                    side = after
                elif next(child.parameters(), None) is not None:
                    side.append(child)
        name = next(n for n, child in owners[-1].named_children() if child is found)
        return cls(owners[-1], name, before, after)


def blocks_of_stages(model: nn.Module, num_stages: int, layers: Layers) -> list[int]:
    """Returns how many blocks each stage gets.

    Args:
        model: With all of its modules.
        num_stages: Of all ranks.
        layers: Blocks of each stage; "even"; or "cost": the squares of the stages' costs have the least sum. A block's
            cost is the number of its weights that a token meets, and the output layer's is added to the last stage.

    Raises:
        InputError: the numbers do not fit the model.
    """
    parts = ModelParts.of(model)
    num = len(parts.blocks)
    if isinstance(layers, list):
        if len(layers) != num_stages or sum(layers) != num or min(layers) < 1:
            raise InputError(
                f"pp_layers {layers} does not divide {num} blocks into {num_stages} stages: give a"
                " number of blocks for each stage, or even, or cost"
            )
        return layers
    if num_stages > num:
        raise InputError(
            f"{num} blocks cannot be divided into {num_stages} stages (pp_size x stages per rank):"
            " set pp_size lower, or another pp_schedule"
        )
    if layers == "even":
        each, more = divmod(num, num_stages)
        return [each + (number < more) for number in range(num_stages)]
    config = getattr(model, "config", None)
    last = _cost(nn.ModuleList(parts.after), config)
    return balanced([_cost(block, config) for block in parts.blocks], last, num_stages)


def bounds_between(counts: list[int]) -> list[tuple[int, int]]:
    """Returns the first block of each stage and one more than its last, of numbers of blocks."""
    ends = [*accumulate(counts)]
    return list(zip([0, *ends], ends, strict=False))


def facts_of(
    model: nn.Module, size: int, schedule: str = "1F1B", interleaved: int = 2, layers: Layers = "cost"
) -> StageFacts:
    """Returns what facts.json has of `model`, with all of its modules, on `size` ranks.

    Raises:
        InputError: the model cannot be divided.
    """
    per_rank = stages_per_rank(schedule, interleaved)
    counts, parts = blocks_of_stages(model, size * per_rank, layers), ModelParts.of(model)
    parameters, last = [], len(counts) - 1
    for stage, (start, stop) in enumerate(bounds_between(counts)):
        modules = [*parts.blocks[start:stop], *parts.before * (stage == 0), *parts.after * (stage == last)]
        parameters.append(sum(p.numel() for p in nn.ModuleList(modules).parameters()))
    return {
        "schedule": schedule,
        "stages": [stages_of_rank(schedule, rank, size, per_rank) for rank in range(size)],
        "blocks": counts,
        "parameters": parameters,
        "bubble": bubble(schedule, size * per_rank, per_rank, 1),  # divided by the micro-batches
    }


def _cost(module: nn.Module, config: object) -> float:
    """Returns the weights of `module`; of stacked experts (E, …) only those of the chosen ones."""
    text = getattr(config, "get_text_config", lambda: config)()
    chosen = getattr(text, "num_experts_per_tok", None)
    cost = 0.0
    for parameter in module.parameters():
        share = 1.0
        if chosen and parameter.dim() == 3:
            share = min(1.0, chosen / len(parameter))
        cost += parameter.numel() * share
    return cost


def _refuse(model: nn.Module, why: str) -> NoReturn:
    raise InputError(f"{type(model).__name__} cannot be a pipeline: {why}; or set pp_size to 1")
