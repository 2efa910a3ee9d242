"""FSDP2, HSDP, tensor and expert parallelism on one mesh of ranks, by transformers' plans.

    dense parameters    (dp_replicate, fsdp, tp)
    experts             (dp_replicate, efsdp, ep),  efsdp = fsdp x tp / ep

A batch is distributed over dp_replicate x fsdp / cp ranks. Ranks that differ only in tp receive the
same rows, and so do cp neighbours along fsdp, which share each sequence (sequence.py). The plans
are in the model's configuration (`base_model_tp_plan`, `base_model_ep_plan`,
`base_model_fsdp_plan`), for every model of transformers. A model without plans is sharded block by
block with torch's `fully_shard`, and so is a plain LightningModule whose layers are made in
`__init__`.

Lightning's ModelParallelStrategy starts the processes and runs the loop. It has a mesh of two
dimensions only, does not know transformers' plans, cannot save strided shards, and refuses a single
rank; this file adds that."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from .. import weights
from ..checkpoint import sharded
from ..checkpoint.commit import agreed
from ..checkpoint.formats import format_of
from ..checkpoint.resume import load_foreign
from ..compat.lightning import set_mesh, start_process_group
from ..errors import InputError
from ..layout import refuse_scalars
from .sequence import shard_batch
from .shard import shard_by_blocks, shard_by_plan

Size = int | Literal["auto"]
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each dimension; `ep` divides fsdp x tp, `cp` divides fsdp: both add no ranks."""

    dp_replicate: int
    fsdp: int
    tp: int
    ep: int
    cp: int = 1

    @property
    def data_parallel(self) -> int:
        """Number of ranks that read different batches."""
        return self.dp_replicate * self.fsdp // self.cp


class MeshStrategy(ModelParallelStrategy):
    """Shards a model over a mesh of ranks.

    Args:
        fsdp_size: Ranks over which parameters, gradients and optimizer state are sharded. auto: all
            that the other sizes leave.
        dp_replicate_size: Replicas of these shards (HSDP), usually one per node. 1: off. auto: all
            that are left.
        tp_size: Ranks that share each matrix product (tensor parallelism), at most those of a node.
            1: off.
        ep_size: Ranks that hold different experts; a multiple of tp_size that divides fsdp_size x
            tp_size. 1: off. auto: fsdp_size x tp_size.
        cp_size: Ranks that share each sequence, for sequences that are too long for one device;
            divides fsdp_size, data.seq_len and the attention heads. 1: off.
        fsdp_plan: Overrides the model's plan: module name to free_full_weight or keep_full_weight.
            null: none.
        tp_plan: Overrides the model's plan: module or parameter name to a style of transformers.
            null: none.
        ep_plan: Overrides the model's plan for experts. null: none.
        cpu_offload: Keep parameters, gradients and optimizer state in host memory. false: on the
            device.
        reduce_each_micro_batch: Reduce-scatter gradients in every micro-batch of an accumulation,
            and accumulate shards. false: only in the last one, which sends less but accumulates
            unsharded gradients: 4 bytes per parameter on every device (2 in bf16-true).
        process_group_backend: torch's name of the backend. null: nccl on GPUs, gloo on CPUs.
        timeout: How long a collective may wait for the other ranks.
    """

    def __init__(
        self,
        fsdp_size: Size = "auto",
        dp_replicate_size: Size = 1,
        tp_size: Size = 1,
        ep_size: Size = 1,
        cp_size: int = 1,
        fsdp_plan: dict[str, str] | None = None,
        tp_plan: dict[str, str] | None = None,
        ep_plan: dict[str, str] | None = None,
        cpu_offload: bool = False,
        reduce_each_micro_batch: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self.fsdp_size = fsdp_size
        self.dp_replicate_size = dp_replicate_size
        self.tp_size = tp_size
        self.ep_size = ep_size
        self.cp_size = cp_size
        self.fsdp_plan = fsdp_plan
        self.tp_plan = tp_plan
        self.ep_plan = ep_plan
        self.cpu_offload = cpu_offload
        self.reduce_each_micro_batch = reduce_each_micro_batch

    # ---- the mesh --------------------------------------------------------------------------------

    def sizes(self, world_size: int) -> MeshSizes:
        """Returns the sizes on `world_size` ranks, with "auto" resolved.

        Raises:
            InputError: their product is not the number of ranks, more than one is "auto", or
                cp_size does not divide fsdp_size.
        """
        names = ("dp_replicate_size", "fsdp_size", "tp_size")
        given: dict[str, Size] = {name: getattr(self, name) for name in names}
        numbers: dict[str, int] = {name: size for name, size in given.items() if size != "auto"}
        automatic = list(given.keys() - numbers.keys())
        if len(automatic) == 1:
            numbers[automatic[0]] = world_size // max(1, prod(numbers.values()))
        if len(automatic) > 1 or min(numbers.values()) < 1 or prod(numbers.values()) != world_size:
            product = " x ".join(f"{name} {size}" for name, size in given.items())
            raise InputError(
                f"{product} does not make {world_size}, the number of processes (trainer.devices x"
                " trainer.num_nodes); edit strategy.init_args, where only one size can be auto"
            )
        replicate, fsdp, tp = (numbers[name] for name in given)
        if self.cp_size < 1 or fsdp % self.cp_size:
            raise InputError(f"cp_size {self.cp_size} must divide fsdp_size {fsdp}: edit cp_size")
        ep = fsdp * tp if self.ep_size == "auto" else self.ep_size
        return MeshSizes(replicate, fsdp, tp, ep, self.cp_size)

    def setup_environment(self) -> None:
        # With offload, gradients are in host memory when they are clipped.
        start_process_group(self, "cpu:gloo,cuda:nccl" if self.cpu_offload else None)
        sizes = self.mesh_sizes = self.sizes(self.world_size)
        dense = (1, sizes.dp_replicate, sizes.fsdp, sizes.tp)
        experts = (1, sizes.dp_replicate, sizes.fsdp * sizes.tp // sizes.ep, sizes.ep)
        device = self.root_device.type  # transformers' own function would use a GPU if there is one
        names = ("pp", "dp_replicate", "fsdp", "tp")
        set_mesh(self, init_device_mesh(device, dense, mesh_dim_names=names))
        names = ("pp", "dp_replicate", "efsdp", "ep")
        self.expert_mesh = init_device_mesh(device, experts, mesh_dim_names=names)
        if sizes.cp > 1:
            parts, names = (sizes.data_parallel, sizes.cp, sizes.tp), ("batch", "cp", "tp")
            mesh = init_device_mesh(device, parts, mesh_dim_names=names)
            self.sequence_group = mesh.get_group("cp")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Which part of the batches this rank reads: the same if ranks differ only in tp or cp."""
        sizes, rank = self.mesh_sizes, self.global_rank // self.mesh_sizes.tp
        return {"num_replicas": sizes.data_parallel, "rank": rank // sizes.cp}

    def shard_batch(self, batch: Any) -> Any:
        """Returns the rank's part of the sequences of a batch; without cp, the batch."""
        return batch if self.mesh_sizes.cp == 1 else shard_batch(batch, self.sequence_group)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        return self.shard_batch(super().batch_to_device(batch, device, dataloader_idx))

    # ---- the model -------------------------------------------------------------------------------

    def connect(self, model: L.LightningModule) -> None:
        super().connect(model)
        if not is_overridden("configure_model", model):  # its layers are made in __init__
            model.configure_model = partial(self._shard_module, model)

    def teardown(self) -> None:
        if self.lightning_module is not None:
            vars(self.lightning_module).pop("configure_model", None)
        super().teardown()

    def _shard_module(self, module: L.LightningModule) -> None:
        """Shards the layers that a plain LightningModule has made, with rank 0's weights.

        The module itself is the outermost FSDP unit, which its steps gather.
        """
        if isinstance(module, FSDPModule) or not self._shards:
            return
        refuse_scalars(module, "FSDP2")
        self.precision_plugin.convert_module(module)
        module.to("cpu" if self.cpu_offload else self.root_device)
        weights.load(module, weights.named_tensors(module))
        shard_by_blocks(module, self)
        for step in STEPS:
            if is_overridden(step, module):
                register_fsdp_forward_method(module, step)

    @property
    def _shards(self) -> bool:
        return self.world_size > 1 or self.cpu_offload

    def shard(self, model: nn.Module) -> nn.Module:
        """Shards `model`, whose weights are on rank 0 only, over the mesh.

        Raises:
            InputError: the model's plans do not allow the configured sizes.
        """
        if not self._shards:
            return model
        refuse_scalars(model, "FSDP2")
        full = weights.take(model)
        has_plan = hasattr(model, "maybe_distribute_model") and (self.fsdp_plan or model.fsdp_plan)
        if has_plan and self.world_size > 1:
            shard_by_plan(model, self)
        else:
            shard_by_blocks(model, self)
        weights.fill(model, full, torch.device("cpu") if self.cpu_offload else self.root_device)
        return model

    def model_to_device(self) -> None:
        assert self.model is not None
        if not self.cpu_offload:
            super().model_to_device()
        for buffer in self.model.buffers():  # like activations, they stay on the device
            buffer.data = buffer.data.to(self.root_device)

    # ---- the step --------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Lightning enters it around every micro-batch but the last of an accumulation.

        HSDP's all-reduce between the replicas is always delayed to the last micro-batch: until then
        only this rank's shard is accumulated.
        """
        self._set_reduces(False)
        try:
            yield
        finally:
            self._set_reduces(True)

    def _set_reduces(self, reduces: bool) -> None:
        assert self.model is not None
        if self.reduce_each_micro_batch and self.mesh_sizes.dp_replicate == 1:
            return
        for unit in self.model.modules():
            if isinstance(unit, FSDPModule):
                if self.reduce_each_micro_batch:
                    unit.set_requires_all_reduce(reduces, recurse=False)
                else:
                    unit.set_requires_gradient_sync(reduces, recurse=False)

    # ---- checkpoints -----------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        sharded.save(checkpoint, Path(weights.broadcast(str(filepath))))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        assert self.model is not None and self.lightning_module is not None
        path = agreed(Path(checkpoint_path))
        if format_of(path) != "distributed":
            return load_foreign(self, path)
        is_fit = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        return sharded.load(path, self.model, self.optimizers if is_fit else [], weights_only)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        assert self.model is not None
        return sharded.optimizer_state(self.model, optimizer)
