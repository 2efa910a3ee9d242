"""The figures of a language model of transformers that estimates are computed from, and its
tensor-parallel plan."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

from ...model.flops import Size, find_experts, text_config
from ...parallel.blocks import find_blocks
from ...parallel.spec.facts import Facts
from .head import head_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def facts_of(model: PreTrainedModel, packed: nn.Module) -> tuple[Size, Facts]:
    """Returns the sizes of a model on one rank, and the figures on which its memory and messages
    depend.

    Args:
        model: On any device; weights are not read.
        packed: The same model with quantized weights, or `model` itself."""
    size = Size.of(packed)
    config, moe, blocks = text_config(model), find_experts(model), find_blocks(model)
    experts = {id(p): p.numel() for p in nn.ModuleList(moe).parameters()}
    largest = largest_experts = 0  # parameters of the largest block, and those of experts in it
    for block in blocks:
        of_block = of_experts = 0
        for parameter in block.parameters():
            of_block += parameter.numel()
            if id(parameter) in experts:
                of_experts += parameter.numel()
        if of_block > largest:
            largest, largest_experts = of_block, of_experts
    replicated = 0
    for name, parameter in model.named_parameters():
        if id(parameter) not in experts and not style_of(model, name):
            replicated += parameter.numel()
    reduced = []  # widths that tensor parallelism all-reduces, in forward or backward
    for name, module in model.named_modules():
        style = style_of(model, name)
        width = "out_features" if style == "rowwise" else "in_features"
        number = getattr(module, width, getattr(module, "embedding_dim", 0))
        if style and number:
            reduced.append(number)
    head: Any = head_of(model)
    heads = getattr(config, "num_attention_heads", None) or 1
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    facts = Facts(
        world_size=1,
        parameters=size.total,
        trainable=size.trainable,
        in_4_bits=size.in_4_bits,
        matrices=size.matrices,
        embedding=size.embedding,
        experts=sum(experts.values()),
        tp_replicates=replicated,
        block=largest,
        block_experts=largest_experts,
        layers=len(blocks),
        predicted=size.predicted,
        width=config.hidden_size,
        vocab_size=head.weight.shape[0],
        moe_layers=len(moe),
        experts_per_token=size.experts_per_token or 0,
        tp_widths=sum(reduced),
        heads=(heads, key_heads, head_dim),
    )
    return size, facts


def style_of(model: PreTrainedModel, name: str) -> str:
    """Returns the tensor-parallel style of a parameter or its module; `*` is a layer there."""
    plan = model.tp_plan
    pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    owner = pattern.rpartition(".")[0]
    return plan.get(pattern) or plan.get(owner, "")
