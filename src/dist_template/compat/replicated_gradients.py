"""Replicated parameters under tensor parallelism whose gradient is a sum over ranks: Qwen3's query
and key norms.

transformers 5.23 sums a parameter's accumulated gradient over the ranks after each micro-batch, the
earlier ones' again each time: with accumulation the gradient is too large, and neither loss nor
norm need show it. Here each micro-batch's gradient is summed as it comes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce

STYLE = "replicated_with_grad_allreduce"


class ReplicatedWithSummedGradient(ReplicatedWithGradAllReduce):
    """The style of that name in a model's plan, once `register` was called."""

    def install_forward(self, module: Any, mesh: Any) -> Any:
        forward = module.forward
        hooked: dict[str, nn.Parameter] = {}

        def summed(gradient: Tensor) -> Tensor:
            local = (gradient.to_local() if isinstance(gradient, DTensor) else gradient).clone()
            dist.all_reduce(local, group=mesh.get_group())
            if isinstance(gradient, DTensor):
                return DTensor.from_local(local, gradient.device_mesh, gradient.placements)
            return local

        def hooked_forward(*args: Any, **kwargs: Any) -> Any:
            for name, parameter in module.named_parameters(recurse=False):
                known = hooked.get(name) is parameter  # it is replaced when weights are filled in
                if torch.is_grad_enabled() and parameter.requires_grad and not known:
                    parameter.register_hook(summed)
                    hooked[name] = parameter
            return forward(*args, **kwargs)

        module.forward = hooked_forward
        return module


def register() -> None:
    """Use it in place of transformers' own."""
    style: Any = ReplicatedWithSummedGradient()  # transformers declares a Callable, but has none
    ALL_PARALLEL_STYLES.register(STYLE, style)
