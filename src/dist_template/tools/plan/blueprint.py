"""The model of a configuration on the meta device: its sizes, and short versions of it to trace."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ...model.flops import Size, find_experts, text_config
from ...model.quantize import quantize
from ...parallel.blocks import find_blocks


class Blueprint:
    """The full model of `module` on the meta device, and `facts` of it like those of a run.

    Raises:
        InputError: the module does not build a language model of transformers.
    """

    def __init__(self, module: Any, data: Any) -> None:
        self.module, adapter = module, getattr(module, "adapter", None)
        self.data = SimpleNamespace(
            vocab_size=_vocab_size(module, data), seq_len=data.seq_len, eos_token_id=0
        )
        module.adapter = adapter and replace(adapter, quantize=None)  # traced as if unpacked
        with torch.device("meta"):
            self.model: Any = module.build_with_adapters(self.data)
        module.adapter = adapter
        self.head: Any = getattr(self.model, "get_output_embeddings", lambda: None)()
        self.blocks = find_blocks(self.model)
        if not self.blocks or self.head is None or not hasattr(self.model, "tp_plan"):
            raise InputError(
                f"plan traces language models of transformers, and {type(self.model).__name__} is"
                " none: return one from build_model in module.py"
            )
        kinds: dict[Any, list[int]] = {}  # numbers of blocks with parameters of the same shapes
        for number, block in enumerate(self.blocks):
            shapes = tuple((name, p.shape) for name, p in block.named_parameters())
            kinds.setdefault(shapes, []).append(number)
        self.kinds = list(kinds.values())
        packed = copy.deepcopy(self.model) if adapter and adapter.quantize else self.model
        if packed is not self.model:
            quantize(packed)
        self.size = Size.of(packed)
        self.facts = self._facts()

    def _facts(self) -> dict[str, Any]:
        size, config, modules = self.size, text_config(self.model), dict(self.model.named_modules())
        experts = {id(p) for each in find_experts(self.model) for p in each.parameters()}
        named = [(n, p) for n, p in self.model.named_parameters() if id(p) not in experts]
        largest = max(self.blocks, key=lambda block: sum(p.numel() for p in block.parameters()))
        of_block = [(p.numel(), id(p) in experts) for p in largest.parameters()]
        styles = [(self._style(name), module) for name, module in modules.items()]
        return {
            "parameters": {
                "total": size.total, "trainable": size.trainable, "in_4_bits": size.in_4_bits,
                "embedding": size.embedding,
                "experts": size.total - sum(p.numel() for _, p in named) if experts else 0,
                "tp_replicates": sum(p.numel() for n, p in named if not self._style(n)),
                "block": sum(number for number, _ in of_block),
                "block_experts": sum(number for number, is_expert in of_block if is_expert),
            },
            "model": {
                "layers": len(self.blocks), "width": config.hidden_size,
                "vocab_size": self.head.weight.shape[0],
                "moe_layers": len(find_experts(self.model)),
                "experts_per_token": size.experts_per_token or 0,
                "flops_per_token": size.flops_per_token(self.data.seq_len),
                # all-reduced by tensor parallelism, in forward or backward
                "tp_widths": sum(_width(m, style) for style, m in styles if style),
            },
        }  # fmt: skip

    def _style(self, name: str) -> str:
        """Returns the tensor-parallel style of a parameter or its module; `*` is a layer there."""
        pattern, plan = re.sub(r"\.\d+(?=\.|$)", ".*", name), self.model.tp_plan
        return plan.get(pattern) or plan.get(pattern.rpartition(".")[0], "")

    def short(self, numbers: list[int], tp: int) -> Any:
        """Returns a copy with only these blocks, as one of `tp` tensor-parallel ranks has them."""
        path = next(
            name
            for name, module in self.model.named_modules()
            if isinstance(module, nn.ModuleList) and module[0] is self.blocks[0]
        )
        owner, _, name = path.rpartition(".")
        parent, every = self.model.get_submodule(owner), self.model.get_submodule(path)
        setattr(parent, name, nn.ModuleList(self.blocks[number] for number in numbers))
        made = copy.deepcopy(self.model)
        setattr(parent, name, every)
        for key, parameter in made.get_submodule(path).named_parameters() if tp > 1 else ():
            style = self._style(f"{path}.{key}")
            if style in ("colwise", "packed_colwise", "rowwise") and parameter.ndim > 1:
                dimension = -1 if style == "rowwise" else -2
                size = parameter.shape[dimension] // tp
                parameter.data = parameter.data.narrow(dimension, 0, size)
        return made


def _width(module: Any, style: str) -> int:
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    return getattr(module, "out_features" if style == "rowwise" else "in_features", 0)


def _vocab_size(module: Any, data: Any) -> int:
    """Returns the vocabulary of the prepared data, of model.architecture or the tokenizer's."""
    if getattr(data, "is_prepared", False):
        return data.vocab_size
    given = (getattr(module, "architecture", None) or {}).get("vocab_size")
    given = given or getattr(getattr(data, "tokenizer", None), "vocab_size", None)
    if not given and not getattr(module, "pretrained", None):
        raise InputError("plan needs the vocabulary's size: set model.architecture.vocab_size")
    return given or 1
