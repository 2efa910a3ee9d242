"""Finds the mixture-of-experts layers of a model, with their routers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from ..compat.transformers import wrappers_of_parameters
from ..layout import full_shape
from .flops import find_experts, num_experts

BIAS = "e_score_correction_bias"


class Layer(NamedTuple):
    """A mixture-of-experts layer.

    Args:
        name: Of the module that holds its router and its experts.
        experts: The stacked experts, called with the indices of the chosen ones.
        num: Experts, of all ranks.
        router: None where it was not found.
        bias_owner: The module whose buffer `BIAS` is; None: the router has none.
    """

    name: str
    experts: nn.Module
    num: int
    router: nn.Module | None
    bias_owner: nn.Module | None


def find_layers(model: nn.Module) -> list[Layer]:
    """The layers whose experts transformers 5 calls with indices; others are not known."""
    stacked = {experts for experts in find_experts(model) if hasattr(experts, "is_concatenated")}
    layers = []
    for name, block in model.named_modules():
        if wrappers_of_parameters(block):
            continue
        for experts in block.children():
            adapters = wrappers_of_parameters(experts)
            owner = adapters[-1].base_layer if adapters else experts
            if owner not in stacked:
                continue
            num = num_experts(owner)
            routers = (
                m
                for m in block.children()
                if any(_is_router_weight(p, num) for p in m.parameters(False))
            )
            owners = (m for m in block.modules() if BIAS in dict(m.named_buffers(recurse=False)))
            layers.append(Layer(name, experts, num, next(routers, None), next(owners, None)))
    return layers


def _is_router_weight(parameter: Tensor, num: int) -> bool:
    shape = full_shape(parameter)
    return len(shape) == 2 and shape[0] == num
