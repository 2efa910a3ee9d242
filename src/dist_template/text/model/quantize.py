"""QLoRA: frozen linear layers in 4 bits (NF4 with double quantization, arXiv:2305.14314).

bitsandbytes' own layer keeps the scales in a Python object beside the weight, which is lost on the
meta device and in a shard. Here packed weights and scales are tensors of the module, bytes that
every strategy sends and shards like any frozen parameter; the rank that makes a weight quantizes
it, and bitsandbytes multiplies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...compat.recording import write_later
from ...errors import require
from .head import head_of

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState
    from transformers import PreTrainedModel

BLOCK, NESTED = 64, 256  # weights that share a scale; scales that share a second scale


class Linear4bit(nn.Linear):
    """A frozen linear layer, quantized from `linear`; of the same shape on the meta device."""

    weights_per_element = {"weight": 2, "scales": 0}  # to count parameters: model/flops.py

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.bias = linear.bias
        weight, num = linear.weight.detach(), linear.weight.numel()
        if weight.is_meta:  # bitsandbytes would cache its tables without values
            blocks = -(-num // BLOCK)
            packed = weight.new_empty((num + 1) // 2, 1, dtype=torch.uint8)
            scales = weight.new_empty(blocks, dtype=torch.uint8)
            nested, offset = weight.new_empty(-(-blocks // NESTED)), weight.new_empty(1)
            write_later(_quantize_into, [packed, scales, nested, offset], weight)
        else:
            packed, scales, nested, offset = _quantized(weight)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.register_buffer("nested", nested, persistent=False)
        self.register_buffer("offset", offset, persistent=False)

    def _state(self) -> QuantState:
        from bitsandbytes.functional import QuantState

        code, nested_code = _codes(self.nested.device)
        shape, dtype = torch.Size((self.out_features, self.in_features)), self.nested.dtype
        nested = QuantState(self.nested, blocksize=NESTED, code=nested_code, dtype=dtype)
        return QuantState(self.scales, shape, code, BLOCK, "nf4", dtype, self.offset, nested)

    def forward(self, input: Tensor) -> Tensor:
        from bitsandbytes import matmul_4bit

        return matmul_4bit(input, self.weight.t(), self._state(), bias=self.bias)

    def dequantized(self) -> nn.Linear:
        """Returns the layer that computes the same with an unpacked weight."""
        from bitsandbytes.functional import dequantize_4bit

        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(dequantize_4bit(self.weight, self._state()), False)
        linear.bias = self.bias
        return linear


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from bitsandbytes.functional import quantize_nf4

    state: Any
    packed, state = quantize_nf4(weight, blocksize=BLOCK, compress_statistics=True)
    return packed, state.absmax, state.state2.absmax, state.offset.reshape(1)


def _quantize_into(
    packed: Tensor, scales: Tensor, nested: Tensor, offset: Tensor, weight: Tensor
) -> None:
    for target, values in zip((packed, scales, nested, offset), _quantized(weight), strict=True):
        target.copy_(values)


@cache
def _codes(device: torch.device) -> tuple[Tensor, Tensor]:
    from bitsandbytes.functional import create_dynamic_map, get_4bit_type

    return get_4bit_type("nf4", device), create_dynamic_map().to(device)


def quantize(model: PreTrainedModel) -> None:
    """Replaces the frozen linear layers of `model`, but for the output layer, like bitsandbytes.
    Raises InputError if that is not installed."""
    require("bitsandbytes", "model.adapter.quantize", extra="adapters")
    head = head_of(model)

    def is_chosen(layer: nn.Module) -> bool:
        is_linear = type(layer) is nn.Linear and layer is not head
        return is_linear and not layer.weight.requires_grad

    replace_layers(model, is_chosen, Linear4bit)


def dequantize(model: nn.Module) -> None:
    """Replaces 4-bit layers by linear layers with the same values."""
    replace_layers(model, lambda layer: isinstance(layer, Linear4bit), Linear4bit.dequantized)


def replace_layers(
    model: nn.Module, chosen: Callable[[nn.Module], bool], make: Callable[[Any], nn.Module]
) -> None:
    """Replaces each layer of `model` for which `chosen(layer)` by `make(layer)`."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if chosen(child):
                setattr(parent, name, make(child))
