"""A model without memory: its sizes, and the bytes of its activations.

The full model is built on the meta device. A copy with one block of each kind is traced forward and
backward, then a copy with two blocks of a kind: the difference is a block. Gradients of parameters
are not computed: what is counted is activations, their gradients, and the 16-bit copies of weights
that autocast keeps."""

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
            # The model reads these values of the data, which need not be prepared.
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
        own = self.objective.own_blocks(self.model)
        if own:  # the last blocks are the objective's own, and it counts them itself
            del self._blocks[-own:]
        # Blocks whose parameters have the same shapes: the shapes, the blocks' numbers.
        self._kinds: dict[tuple[object, ...], list[int]] = {}
        for number, block in enumerate(self._blocks):
            shapes = tuple((name, p.shape) for name, p in block.named_parameters())
            self._kinds.setdefault(shapes, []).append(number)
        packed = copy.deepcopy(self.model)
        adapter = getattr(module, "adapter", None)
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
        one_row = self._all_blocks(1, half, casts, tp, mode)
        each_further = one_row
        if casts and not half:  # copies of weights do not grow with the tokens
            each_further = self._all_blocks(2, half, casts, tp, mode) - one_row
        kept, peak = (one_row + (rows - 1) * each_further).tolist()
        return kept, peak

    def _all_blocks(self, *key: Any) -> Tensor:
        """Returns what `_trace` would, with all blocks: a model with one block of each kind, and
        for each further block the difference that a second one of its kind makes."""
        first = tuple(numbers[0] for numbers in self._kinds.values())
        base = self._peaks(first, *key)
        total = base
        for numbers in self._kinds.values():
            if len(numbers) > 1:
                longer = self._peaks(tuple(sorted((*first, numbers[1]))), *key)
                total = total + (len(numbers) - 1) * (longer - base)
        return total

    def _trace(
        self, numbers: tuple[int, ...], rows: int, half: bool, casts: bool, tp: int, mode: Any
    ) -> Tensor:
        """Returns (2,): the bytes at the end of forward, and the peak of backward."""
        short = self._short(numbers, tp)
        blocks = replace(self._module.blocks, checkpointing=mode, checkpoint_every=1, compile=False)
        wrap_blocks(short, blocks)
        embedded: list[Tensor] = []  # the embedding's output, at which backward ends

        def detach(module: nn.Module, args: object, output: Tensor) -> Tensor:
            embedded.append(output.detach().requires_grad_())
            return embedded[0]

        with fake_tensors(self._on_gpu, fp32=not (half or casts)):
            model = short.to_empty(device="cpu").train()
            self._module.model = model
            for parameter in model.parameters():
                if half and parameter.is_floating_point():
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
                kept = counter.live
                counter.peak = kept  # from here on, the peak of backward
                torch.autograd.grad(hidden.sum(), embedded)
        del self._module.model
        return torch.tensor([kept, counter.peak], dtype=torch.float64)

    def _short(self, numbers: tuple[int, ...], tp: int) -> PreTrainedModel:
        """Returns a copy with only these blocks, as one of `tp` tensor-parallel ranks has them."""
        path, all_blocks = self._list_of_blocks()
        owner, _, name = path.rpartition(".")
        parent = self.model.get_submodule(owner)
        # The model has the short list while it is copied, then its own again.
        setattr(parent, name, nn.ModuleList(self._blocks[number] for number in numbers))
        short = copy.deepcopy(self.model)
        setattr(parent, name, all_blocks)
        self.objective.copied(short)
        if tp == 1:
            return short
        for key, parameter in short.get_submodule(path).named_parameters():
            style = style_of(self.model, f"{path}.{key}")
            if style == "rowwise" and parameter.ndim > 1:  # its bias is of full length
                dimension = -1
            elif style in ("colwise", "packed_colwise"):
                dimension = max(-2, -parameter.ndim)
            else:
                continue
            size = parameter.shape[dimension] // tp
            parameter.data = parameter.data.narrow(dimension, 0, size)
        return short

    def _list_of_blocks(self) -> tuple[str, nn.ModuleList]:
        """Returns the name and the list of the module whose entries are the blocks."""
        for path, module in self.model.named_modules():
            if isinstance(module, nn.ModuleList) and module[0] is self._blocks[0]:
                return path, module
        raise AssertionError("find_blocks returned blocks that are in no list")


def _vocab_size(module: object, data: Any) -> int:
    """Returns the vocabulary of the prepared data, of model.architecture or the tokenizer's; 1 if
    published weights will say it."""
    if getattr(data, "is_prepared", False):
        return data.vocab_size
    architecture = getattr(module, "architecture", None) or {}
    tokenizer = getattr(data, "tokenizer", None)
    vocab_size = architecture.get("vocab_size") or getattr(tokenizer, "vocab_size", None)
    if vocab_size:
        return vocab_size
    if getattr(module, "pretrained", None):
        return 1
    raise InputError("plan needs the vocabulary's size: set model.architecture.vocab_size")
