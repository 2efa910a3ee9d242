"""Sends full (unsharded) tensors from rank 0 to the shards of all ranks.

Rank 0 builds the model, and every other rank builds it on torch's meta device, without memory; then
each tensor is sent from rank 0 to the ranks that need it. So a node's host memory holds one model,
and the starting weights do not depend on the strategy.

torch's `set_model_state_dict(broadcast_from_rank0=True)` does not support non-persistent buffers,
the interleaved shards of transformers' packed plans, or DeepSpeed's partitions.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import weights
from ..compat.transformers import shard_for


def move_to_meta(module: nn.Module) -> dict[str, Tensor]:
    """Moves `module` to the meta device; returns its weights on rank 0, {} on other ranks."""
    full = {}
    if weights.is_rank_zero():
        full = {name: each.detach() for name, each in weights.named_tensors(module).items()}
    with weights.kept_ties(module):
        module.to("meta")
    return full


def broadcast_weights(module: nn.Module, device: torch.device) -> None:
    """Broadcasts rank 0's weights: every rank has the full ones afterwards."""
    if not weights.is_alone():
        materialize(module, move_to_meta(module), device)


@torch.no_grad()
def materialize(module: nn.Module, full: dict[str, Tensor], device: torch.device) -> None:
    """Allocates a meta-device module on `device` and loads rank 0's `full` tensors into it."""
    with weights.kept_ties(module):
        module.to_empty(device=device)
    load_weights(module, full)


@torch.no_grad()
def load_weights(module: nn.Module, full: dict[str, Tensor]) -> None:
    """Copies rank 0's `full` tensors by name into `module`, each rank its shard. Collective.

    Tensors whose names `full` lacks are unchanged; those that `module` lacks are not kept, as in a
    stage of a pipeline. `full` of other ranks is ignored.
    """
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    values = {name: tensor for name, tensor in full.items() if isinstance(tensor, Tensor)}
    options = {name: (tensor.shape, tensor.dtype) for name, tensor in values.items()}
    for name, (shape, dtype) in weights.broadcast(options).items():
        meta = torch.empty(shape, dtype=dtype, device="meta")
        copy_shard(tensors.get(name), full.get(name), meta)


def copy_shard(target: Tensor | None, full: Tensor | None, meta: Tensor) -> None:
    """Copies rank 0's `full` into `target`, this rank's shard, or None; `meta` is like `full`, on every rank."""
    if target is not None and weights.is_partitioned_by_zero(target):
        with weights.gathered_from_zero(target):
            if full is not None:
                target.copy_(full)
        return
    received = tensor_from_rank_zero(full, meta)
    if isinstance(target, DTensor):
        local = target.to_local()
        if local.numel():  # transformers' operation has no shard without rows
            local.copy_(shard_for(target, received))
    elif target is not None:
        target.copy_(received)


def tensor_from_rank_zero(tensor: Tensor | None, like: Tensor) -> Tensor:
    """Returns rank 0's `tensor` on all ranks, with `like`'s shape and type: on the GPU if the process group is NCCL's;
    otherwise on `like`'s device, or on the CPU if that is the meta device."""
    device = like.device
    if dist.is_initialized() and "nccl" in dist.get_backend():
        device = torch.device("cuda", torch.cuda.current_device())
    elif like.is_meta:
        device = torch.device("cpu")
    if tensor is None:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
    tensor = tensor.to(device=device, dtype=like.dtype).contiguous()
    if not weights.is_alone():
        dist.broadcast(tensor, src=0)
    return tensor
