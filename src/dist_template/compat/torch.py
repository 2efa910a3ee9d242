"""Private names of torch that the library needs. Verified on torch 2.13; tests/compat/test_names.py
checks them. Where a name is gone: AttributeError or ImportError."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import _muon
from torch.optim import optimizer as _optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

__all__ = [
    "keystr",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]  # torch has no public pytree module (2.13)

# Operations whose results activation checkpointing keeps: torch has public names for the matrix
# products alone.
EXPENSIVE = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def version_of(tensor: Tensor) -> int:
    """Returns the counter that every write in place increments. torch has no public name for it."""
    return tensor._version


def coordinate_of(rank: int, mesh: DeviceMesh) -> list[int]:
    """Returns the coordinate that `rank` has in `mesh`, or in the mesh beside it that has the same
    dimensions."""
    root = mesh._get_root_mesh()
    names: Any = root.mesh_dim_names or range(root.ndim)
    of_root = dict(zip(names, (root.mesh == rank).nonzero()[0].tolist(), strict=True))
    return [of_root[name] for name in mesh.mesh_dim_names or names]


def is_persistent(module: Any, buffer: str) -> bool:
    """Returns whether the module's own buffer of that name is part of checkpoints."""
    return buffer not in module._non_persistent_buffers_set


def num_writes(tensor: Tensor) -> int:
    """Returns how often the tensor has been changed in place, as autograd counts it."""
    return tensor._version


def drop_weak_references(module: Any) -> None:
    """Lets `swap_tensors` swap the parameters of a torch.nn.LSTM, whose weak references would show
    a replaced one."""
    references = getattr(module, "_flat_weight_refs", [])
    references[:] = [None] * len(references)


def loss_scale(scaler: Any) -> Any:
    """Returns a GradScaler's scale on the device: the public `get_scale` waits for the device."""
    return scaler._get_scale_async()


def mark_overflow(scaler: Any, optimizer: Any) -> None:
    """Makes a GradScaler count the current step of `optimizer` as an overflow: each rank's scaler
    knows its own gradients only, and the ranks' scales must stay equal."""
    for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
        found.fill_(1.0)


def without_profiler_range(batches: Any) -> Iterator[Any]:
    """Returns a DataLoader's iterator, which has no workers, without the profiler range around each
    batch, which took half of its time."""
    return iter(batches._next_data, None)


def step_of(optimizer: Any) -> Callable[..., Any]:
    """Returns `optimizer.step` without its profiler range, which takes longer than the update of a
    small model, unless a profiler runs, or the step has a hook or is replaced (not by a schedule,
    which only notes that it was called)."""
    step, of_class = optimizer.step, type(optimizer).step
    is_torchs = "step" not in vars(optimizer) or hasattr(step, "_wrapped_by_lr_sched")
    is_torchs = is_torchs and hasattr(of_class, "hooked") and hasattr(of_class, "__wrapped__")
    if not is_torchs or torch.autograd._profiler_enabled():
        return step
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if hooks or _optimizer._global_optimizer_pre_hooks or _optimizer._global_optimizer_post_hooks:
        return step
    optimizer._opt_called = True
    return partial(of_class.__wrapped__, optimizer)


class _InFloat32(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.Tensor.float if func is torch.Tensor.bfloat16 else func)(
            *args, **(kwargs or {})
        )


def orthogonalized(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Returns the nearest semi-orthogonal matrices, about, by torch.optim.Muon's iteration: (R, C)
    or (E, R, C), of the same shape. Overwrites `matrices`. The public class accepts parameters of
    two dimensions alone. torch iterates in bfloat16. Here float32 stays float32: on a CPU it is
    faster, and all strategies round alike."""
    iterate = partial(
        _muon._zeropower_via_newtonschulz, ns_coefficients=coefficients, ns_steps=steps, eps=eps
    )
    with _InFloat32() if matrices.dtype == torch.float32 else nullcontext():
        if matrices.ndim == 2 or not matrices.numel():
            return iterate(matrices) if matrices.numel() else matrices
        return torch.vmap(iterate)(matrices)


def update_scale(shape: torch.Size, name: str) -> float:
    """Returns the factor of the learning rate for matrices (..., R, C), by a name of
    torch.optim.Muon's."""
    return _muon._adjust_lr(1.0, name, torch.Size(shape[-2:]))


def compile_checkpointed_hooks() -> None:
    """Lets torch.compile accept a checkpointed block in which a hook keeps a tensor (balance.py);
    torch 2.13 otherwise runs it eagerly, and the hook again in the backward pass."""
    config: Any = torch._dynamo.config
    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def reduce_pipeline_gradients(model: Any) -> None:
    """Reduces the gradients that FSDP2 has accumulated in all micro-batches of a pipeline's step: a
    schedule splits the backward pass, so autograd's hooks do not run as FSDP2 expects. torch's
    stage (2.13, `perform_reduce_grad`) makes the same calls, for a module of its own."""
    sharder: Any = fully_shard
    root = sharder.state(model)
    for state in root._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            group.post_backward()
    root._root_post_backward_final_callback()


# ---- process groups ------------------------------------------------------------------------------


def process_groups() -> list[dist.ProcessGroup]:
    """Returns all process groups of this rank. torch has no public list of them."""
    return list(dist.distributed_c10d._world.pg_map)


def default_store() -> dist.Store:
    """Returns the store by which the ranks of the default group have found each other."""
    return dist.distributed_c10d._get_default_store()


def limit_collectives(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Sets the timeout of an existing group's collectives (publicly only of a new group's)."""
    dist.distributed_c10d._set_pg_timeout(limit, group)


# ---- distributed checkpoints ---------------------------------------------------------------------


def read_unsharded(reader: FileSystemReader, keys: set[str] | None = None) -> dict[str, Any]:
    """Reads a distributed checkpoint, or its entries `keys`, as full tensors in one process,
    without a model. The public `dcp_to_torch_save` writes a file and unpickles with a reader of its
    own."""
    tensors: dict[str, Any] = {}
    _load_state_dict(tensors, reader, planner=_EmptyStateDictLoadPlanner(keys), no_dist=True)
    return tensors


def metadata_path(reader: FileSystemReader, rank: int | None) -> Any:
    """Returns where `reader` reads the checkpoint's metadata from."""
    return reader._get_metadata_path(rank)
