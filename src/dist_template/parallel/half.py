"""bf16-true and 16-true: parameters in half precision, and only parameters."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import HalfPrecision
from torch import nn


class HalfParameters(HalfPrecision):
    """Lightning's own casts buffers too: rotary frequencies in bfloat16 are off by whole positions in long sequences.

    It is called before a model is sharded and again after it, when nothing is left to do: casting what is sharded
    would take parameters that two modules share apart.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        for parameter in module.parameters():
            if parameter.is_floating_point() and parameter.dtype != self._desired_input_dtype:
                parameter.data = parameter.data.to(self._desired_input_dtype)
        return module
