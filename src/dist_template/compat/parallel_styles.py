"""Styles of tensor and expert parallelism. Verified on transformers 5.23 and peft 0.21; importing
this file raises ImportError where a name is gone.

Replicated parameters whose gradient is a sum over ranks (Qwen3's query and key norms): transformers
sums a parameter's accumulated gradient after each micro-batch, the earlier ones' again each time.
Here each micro-batch's gradient is summed when it is computed.

Adapters of stacked experts: peft adapts a parameter by a wrapper around the module that owns it.
transformers dispatches tokens to that wrapper and knows nothing of its matrices. Here the plans'
names follow the parameter into the wrapper, which runs on this rank's shards."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.distributed.expert_parallel import EpDispatchExpertsParallel, MoEParamShard
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, _AllReduceBackward
from transformers.distributed.tensor_parallel import MoeExpertsParallel, ReplicatedWithGradAllReduce

from .transformers import wrappers_of_parameters

STYLE = "replicated_with_grad_allreduce"


class ReplicatedWithSummedGradient(ReplicatedWithGradAllReduce):
    """The style of that name in a model's plan, once `register_replicated` was called."""

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


def register_replicated() -> None:
    """Replaces transformers' own style for replicated parameters."""
    style: Any = ReplicatedWithSummedGradient()  # transformers declares a Callable, but has none
    ALL_PARALLEL_STYLES.register(STYLE, style)


def register_expert_adapters(rank: int) -> str:
    """Returns the name of the style for a `lora_B` of `rank`, whose columns are (rank, experts)."""
    name = f"grouped_lora_b_of_rank_{rank}"
    styles: Any = ALL_PARALLEL_STYLES
    styles.register(name, MoEParamShard(_StridedShard(1, split_factor=rank)))
    styles.register("ep_dispatch_experts", _Dispatch())
    styles.register("moe_tp_experts", _Partial())
    return name


class _Dispatch(EpDispatchExpertsParallel):
    """Expert parallelism: every matrix of the wrapper is sharded by experts."""

    def install_forward(self, module: Any, ep_mesh: Any, **options: Any) -> Any:
        for wrapper in wrappers_of_parameters(module):
            wrapper.num_experts //= ep_mesh.size()
        return super().install_forward(module, ep_mesh, **options)

    def context_around_forward(self, module: Any, mesh: Any) -> Any:
        return _local(module, None)


class _Partial(MoeExpertsParallel):
    """Tensor parallelism: a matrix of each pair is sharded, the gradient of the other summed."""

    def context_around_forward(self, module: Any, mesh: Any) -> Any:
        group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
        return _local(module, group)


@contextmanager
def _local(module: nn.Module, group: Any) -> Generator[None]:
    """Inside, the parameters of `module` and its children are this rank's plain tensors. `group`:
    over which gradients of replicated parameters are summed. None: there are none."""
    replaced = []
    owner: Any
    for owner in module.modules():
        for name, parameter in [*owner.named_parameters(recurse=False)]:
            replaced.append((owner, name, parameter))
            if isinstance(parameter, DTensor):
                local: Any = parameter.to_local()
                if not parameter.requires_grad:  # peft parametrizes it: it must be a parameter
                    local = nn.Parameter(local, requires_grad=False)
                owner._parameters[name] = local
            elif group is not None and parameter.requires_grad:
                owner._parameters[name] = _AllReduceBackward.apply(parameter, group)
    for wrapper in wrappers_of_parameters(module) if group is not None else ():
        layer = wrapper.lora_B["default"]
        rows = wrapper.get_param().shape[-2]  # of this rank: its part of the gate, then of the up
        if layer.weight.shape[0] > rows:
            parts = layer.weight.unflatten(0, (2, -1)).split(rows // 2, dim=1)
            layer._parameters["weight"] = parts[dist.get_rank(group)].flatten(0, 1)
    try:
        yield
    finally:
        for owner, name, parameter in replaced:
            owner._parameters[name] = parameter
