"""bf16-true and 16-true: parameters in half precision, and only parameters."""

from __future__ import annotations

import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import nn


class HalfParameters(HalfPrecision):
    """Lightning's own casts buffers too: rotary frequencies in bfloat16 are off by whole positions in long sequences.

    It is called before a model is sharded and again after it, when nothing is left to do: casting what is sharded
    would take parameters that two modules share apart.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        dtype = {"bf16-true": torch.bfloat16, "16-true": torch.float16}[self.precision]
        for parameter in module.parameters():
            if parameter.is_floating_point() and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
        return module
