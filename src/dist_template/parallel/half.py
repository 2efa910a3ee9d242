"""bf16-true and 16-true: parameters in half precision, buffers unchanged."""

import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import nn


class HalfParameters(HalfPrecision):
    """Casts parameters only: rotary frequencies in bfloat16 are wrong in long sequences.

    Lightning calls it again after a model is sharded, when it must change nothing: casting sharded
    parameters would untie those that two modules share."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        dtype = {"bf16-true": torch.bfloat16, "16-true": torch.float16}[self.precision]
        for parameter in module.parameters():
            if parameter.is_floating_point() and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
        return module
