"""Where a model is cut: its list of blocks, what stands before and after it, how many blocks each
stage gets."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Literal, NoReturn

from torch import nn

from ...errors import InputError
from ..blocks import find_blocks
from .costs import balanced, bubble, stages_of_rank, stages_per_rank


def outline(model: nn.Module) -> tuple[nn.Module, str, list[nn.Module], list[nn.Module]]:
    """Returns the owner of the list of blocks, its name there, and the outermost other modules that
    have parameters: those defined before the blocks, and those defined after them.

    Raises:
        InputError: the model is no sequence of blocks.
    """
    blocks = find_blocks(model)
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and [*m] == blocks)
    if not blocks or (found := next(lists, None)) is None:
        _refuse(model, "its blocks are not the items of one nn.ModuleList")
    above = [m for m in model.modules() if m is not found and found in m.modules()]
    before: list[nn.Module] = []
    after: list[nn.Module] = []
    for owner, on_path in zip(above, [*above[1:], found], strict=True):
        for name, _ in owner.named_parameters(recurse=False):
            _refuse(model, f"{name} is a parameter of {type(owner).__name__}: give it a module")
        side = before
        for child in owner.children():
            if child is on_path:
                side = after
            elif any(True for _ in child.parameters()):
                side.append(child)
    parent = above[-1]
    return parent, next(n for n, c in parent.named_children() if c is found), before, after


def bounds_of(
    model: nn.Module, num_stages: int, layers: Literal["cost", "even"] | list[int]
) -> list[tuple[int, int]]:
    """Returns the first block of each stage and one more than its last.

    Args:
        model: With all of its modules.
        num_stages: Of all ranks.
        layers: Blocks of each stage; "even"; or "cost": the squares of the stages' costs have the
            least sum. A block's cost is the number of its weights that a token meets, and the
            output layer's is added to the last stage.

    Raises:
        InputError: the numbers do not fit the model.
    """
    parent, name, _, after = outline(model)
    blocks = [*getattr(parent, name)]
    if isinstance(layers, list):
        if len(layers) != num_stages or sum(layers) != len(blocks) or min(layers) < 1:
            raise InputError(
                f"pp_layers {layers} does not divide {len(blocks)} blocks into {num_stages} stages:"
                " give a number of blocks for each stage, or even, or cost"
            )
        counts = layers
    elif num_stages > len(blocks):
        raise InputError(
            f"{len(blocks)} blocks cannot be divided into {num_stages} stages (pp_size x stages per"
            " rank): set pp_size lower, or another pp_schedule"
        )
    elif layers == "even":
        counts = [len(blocks) // num_stages] * num_stages
        for number in range(len(blocks) % num_stages):
            counts[number] += 1
    else:
        config = getattr(model, "config", None)
        last = sum(_cost(module, config) for module in after)
        counts = balanced([_cost(block, config) for block in blocks], last, num_stages)
    return bounds_between(counts)


def bounds_between(counts: list[int]) -> list[tuple[int, int]]:
    """Returns the first block of each stage and one more than its last, of numbers of blocks."""
    ends = [*accumulate(counts)]
    return list(zip([0, *ends], ends, strict=False))


def facts_of(
    model: nn.Module, size: int, schedule: str = "1F1B", interleaved: int = 2, layers: Any = "cost"
) -> dict[str, Any]:
    """Returns what facts.json has of `model`, with all of its modules, on `size` ranks.

    Raises:
        InputError: the model cannot be divided.
    """
    per_rank = stages_per_rank(schedule, interleaved)
    bounds = bounds_of(model, size * per_rank, layers)
    parent, name, before, after = outline(model)
    parts = [[*getattr(parent, name)[start:stop]] for start, stop in bounds]
    parts[0], parts[-1] = parts[0] + before, parts[-1] + after
    return {
        "schedule": schedule,
        "stages": [stages_of_rank(schedule, rank, size, per_rank) for rank in range(size)],
        "blocks": [stop - start for start, stop in bounds],
        "parameters": [sum(p.numel() for p in nn.ModuleList(part).parameters()) for part in parts],
        "bubble": bubble(schedule, size * per_rank, per_rank, 1),  # divided by the micro-batches
    }


def _cost(module: nn.Module, config: Any) -> float:
    """Weights of `module`; of stacked experts (E, …) those of the chosen ones alone."""
    text = getattr(config, "get_text_config", lambda: config)()
    chosen = getattr(text, "num_experts_per_tok", None)
    return sum(
        p.numel() * (min(1.0, chosen / len(p)) if chosen and p.dim() == 3 else 1.0)
        for p in module.parameters()
    )


def _refuse(model: nn.Module, why: str) -> NoReturn:
    raise InputError(f"{type(model).__name__} cannot be a pipeline: {why}; or set pp_size to 1")
