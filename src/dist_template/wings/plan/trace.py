"""A model without memory: its sizes, and the bytes of its activations.

The full model is on the meta device. Of it a model with one block of each kind is traced forward
and backward, then one with two of a kind: the difference is a block. Gradients of parameters are
not computed: what is counted is activations, their gradients, and the 16-bit copies of weights that
autocast keeps."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...compat.fake_tensors import LiveBytes, fake_tensors
from ...compat.transformers import cast_experts
from ...errors import InputError
from ...parallel.blocks import find_blocks, wrap_blocks
from ...text.model.facts import facts_of, style_of
from ...text.model.head import without_head
from ...text.model.kernels import BOUNDS
from ...text.model.quantize import quantize
from ...text.objectives.next_token import NextToken
from ...text.objectives.objective import objective_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Traced:
    """The model that `module` builds for `data`, whose sizes alone are read."""

    def __init__(self, module: Any, data: Any, on_gpu: bool) -> None:
        model, self._blocks = None, []
        if hasattr(module, "build_config") and hasattr(data, "seq_len"):
            vocab_size = _vocab_size(module, data)
            self.data = SimpleNamespace(seq_len=data.seq_len, eos_token_id=0, vocab_size=vocab_size)
            self.data.source = getattr(data, "source", None)  # by which an objective is chosen
            with torch.device("meta"):
                model = module.build_network(self.data, quantized=False)
            self._blocks = find_blocks(model)
        if not self._blocks or not hasattr(model, "tp_plan"):
            kinds = f"{type(module).__name__} with {type(data).__name__}"
            raise InputError(
                f"plan traces language models of transformers, and {kinds} has no such model"
            )
        self._module, self._on_gpu, self._seq_len = module, on_gpu, data.seq_len
        self._masks = getattr(data, "cross_document_attention", None) is False  # documents apart
        self.model: PreTrainedModel = model
        self.objective = objective_for(module, data) or NextToken()
        if own := self.objective.own_blocks(self.model):
            del self._blocks[-own:]
        self._kinds: dict[
            tuple[object, ...], list[int]
        ] = {}  # blocks with parameters of the same shapes
        for number, block in enumerate(self._blocks):
            shapes = tuple((name, p.shape) for name, p in block.named_parameters())
            self._kinds.setdefault(shapes, []).append(number)
        packed, adapter = copy.deepcopy(self.model), getattr(module, "adapter", None)
        if adapter and adapter.quantize:
            quantize(packed)
        self.size, self.facts = facts_of(self.model, packed)
        self._peaks = cache(self._trace)
        self.flops_per_token = self.size.flops_per_token(self._seq_len) or 0.0
        cast_experts()

    def activations(
        self, rows: int, half: bool, casts: bool, tp: int, mode: str
    ) -> tuple[float, float]:
        """Returns the bytes of `rows` sequences that forward keeps, and the most in backward, with
        weights of 16 bits (`half`) or cast, on `tp` tensor-parallel ranks, checkpointed by
        `mode`."""
        one = more = self._all_blocks(1, half, casts, tp, mode)
        if casts and not half:  # copies of weights do not grow with the tokens
            more = self._all_blocks(2, half, casts, tp, mode) - one
        return tuple((one + (rows - 1) * more).tolist())

    def _all_blocks(self, *key: Any) -> Tensor:
        first = tuple(numbers[0] for numbers in self._kinds.values())
        base = total = self._peaks(first, *key)
        for _, *others in self._kinds.values():
            if others:
                longer = self._peaks(tuple(sorted([*first, others[0]])), *key)
                total = total + len(others) * (longer - base)
        return total

    def _trace(
        self, numbers: tuple[int, ...], rows: int, half: bool, casts: bool, tp: int, mode: Any
    ) -> Tensor:
        """Returns (2,): the bytes at the end of forward, and the peak of backward."""
        short, leaf = self._short(numbers, tp), []
        wrap_blocks(
            short,
            replace(self._module.blocks, checkpointing=mode, checkpoint_every=1, compile=False),
        )

        def detach(*given: Any) -> Tensor:
            leaf.append(given[-1].detach().requires_grad_())
            return leaf[0]

        with fake_tensors(self._on_gpu, fp32=not (half or casts)):
            model = self._module.model = short.to_empty(device="cpu").train()
            for parameter in model.parameters() if half else ():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.bfloat16)
            tokens = torch.zeros(rows, self._seq_len, dtype=torch.long)
            bounds = torch.zeros(rows + 1 + self._masks, dtype=torch.int)
            model.get_input_embeddings().register_forward_hook(detach)
            counter = LiveBytes([*model.parameters(), *model.buffers(), tokens, bounds])
            autocast = torch.autocast("cpu", torch.bfloat16, enabled=casts)
            forwarding = self.objective.forwarding(model, tokens)
            with counter, autocast, forwarding, without_head(model):
                batch = {"input_ids": tokens, "position_ids": tokens, BOUNDS: bounds}
                hidden = self._module(batch)
                kept = counter.peak = counter.live
                torch.autograd.grad(hidden.sum(), leaf)
        del self._module.model
        return torch.tensor([kept, counter.peak], dtype=torch.float64)

    def _short(self, numbers: tuple[int, ...], tp: int) -> PreTrainedModel:
        """Returns a copy with only these blocks, as one of `tp` tensor-parallel ranks has them."""
        lists = [(n, m) for n, m in self.model.named_modules() if isinstance(m, nn.ModuleList)]
        path, every = next((n, m) for n, m in lists if m[0] is self._blocks[0])
        owner, _, name = path.rpartition(".")
        parent = self.model.get_submodule(owner)
        setattr(parent, name, nn.ModuleList(self._blocks[number] for number in numbers))
        made = copy.deepcopy(self.model)
        setattr(parent, name, every)
        self.objective.copied(made)
        for key, parameter in made.get_submodule(path).named_parameters() if tp > 1 else ():
            style = style_of(self.model, f"{path}.{key}")
            rowwise = style == "rowwise" and parameter.ndim > 1  # its bias is of full length
            if rowwise or style in ("colwise", "packed_colwise"):
                dimension = -1 if rowwise else max(-2, -parameter.ndim)
                size = parameter.shape[dimension] // tp
                parameter.data = parameter.data.narrow(dimension, 0, size)
        return made


def _vocab_size(module: object, data: Any) -> int:
    """Returns the vocabulary of the prepared data, of model.architecture or the tokenizer's."""
    if getattr(data, "is_prepared", False):
        return data.vocab_size
    given = (getattr(module, "architecture", None) or {}).get("vocab_size")
    given = given or getattr(getattr(data, "tokenizer", None), "vocab_size", None)
    if not given and not getattr(module, "pretrained", None):
        raise InputError("plan needs the vocabulary's size: set model.architecture.vocab_size")
    return given or 1
