"""FSDP2, HSDP, tensor, expert and pipeline parallelism on one mesh of ranks.

    dense parameters    (pp, dp_replicate, fsdp, tp)
    experts             (pp, dp_replicate, efsdp, ep),  efsdp = fsdp x tp / ep

A batch is distributed over dp_replicate x fsdp / cp ranks. Ranks that differ only in pp or tp get the same rows, and so
do cp neighbours along fsdp, which share each sequence (sequence.py); the folder pipeline/ runs the stages of pp. What
is sharded how says transformers' plan in the model's configuration (`base_model_tp_plan`, `base_model_ep_plan`,
`base_model_fsdp_plan`), for every model of transformers. A model without plans is sharded block by block with torch's
`fully_shard`, and so is a plain LightningModule whose layers are made in `__init__`.

Lightning's ModelParallelStrategy starts the processes and runs the loop. It has a mesh of two dimensions only, does not
know transformers' plans, cannot save strided shards, and refuses a single rank; this file adds that."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from .. import weights
from ..checkpoint import formats, scatter, sharded
from ..compat.lightning import set_configure_model, set_mesh, start_process_group
from ..errors import InputError
from ..layout import refuse_scalars
from .mesh_sharding import AXES, Mesh, Size
from .pipeline.costs import Layers, Schedule
from .pipeline.run import Pipeline, divide
from .protocol import DataRank
from .run_strategy import RunDefaults, T
from .sequence import shard_batch
from .shard import shard_by_blocks, shard_by_plan, shard_module, try_rank


class MeshStrategy(RunDefaults, ModelParallelStrategy):
    """Shards a model over a mesh of ranks.

    Args:
        fsdp_size: Ranks over which parameters, gradients and optimizer state are sharded. auto: all
            that the other sizes leave.
        dp_replicate_size: Replicas of these shards (HSDP), usually one per node. 1: off. auto: all that are left.
        tp_size: Ranks that share each matrix product (tensor parallelism), at most those of a node. 1: off.
        ep_size: Ranks that hold different experts; a multiple of tp_size that divides fsdp_size x
            tp_size. 1: off. auto: fsdp_size x tp_size.
        cp_size: Ranks that share each sequence, for sequences that are too long for one device;
            divides fsdp_size, data.seq_len and the attention heads. 1: off.
        pp_size: Ranks that each hold some of the blocks (pipeline parallelism). 1: off.
        pp_schedule: The order of micro-batches: GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble
            (pp_stages_per_rank stages on each rank), ZBVZeroBubble or DualPipeV (two stages).
        pp_stages_per_rank: Stages of each rank in the interleaved schedules.
        pp_layers: Blocks of each stage, in order. cost: by their weights, the output layer's too. even: equally many.
        fsdp_plan: Overrides the model's plan: module name to free_full_weight or keep_full_weight. null: none.
        tp_plan: Overrides the model's plan: module or parameter name to a style of transformers. null: none.
        ep_plan: Overrides the model's plan for experts. null: none.
        cpu_offload: Keep parameters, gradients and optimizer state in host memory. false: on the device.
        reduce_each_micro_batch: Reduce-scatter gradients in every micro-batch of an accumulation,
            and accumulate shards. false: only in the last one, which sends less but accumulates
            unsharded gradients: 4 bytes per parameter on every device (2 in bf16-true).
        process_group_backend: torch's name of the backend. null: nccl on GPUs, gloo on CPUs.
        timeout: How long a collective may wait for the other ranks.
        sizes: Of axes that a package adds to `AXES`, by their keys.
    """

    def __init__(
        self,
        fsdp_size: Size = "auto",
        dp_replicate_size: Size = 1,
        tp_size: Size = 1,
        ep_size: Size = 1,
        cp_size: int = 1,
        pp_size: Size = 1,
        pp_schedule: Schedule = "1F1B",
        pp_stages_per_rank: int = 2,
        pp_layers: Layers = "cost",
        fsdp_plan: dict[str, str] | None = None,
        tp_plan: dict[str, str] | None = None,
        ep_plan: dict[str, str] | None = None,
        cpu_offload: bool = False,
        reduce_each_micro_batch: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
        **sizes: Size,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        if unknown := sizes.keys() - {axis.key for axis in AXES}:
            raise InputError(f"MeshStrategy has no {', '.join(sorted(unknown))}: remove it")
        sizes |= {
            "fsdp_size": fsdp_size, "dp_replicate_size": dp_replicate_size, "tp_size": tp_size, "ep_size": ep_size,
            "cp_size": cp_size, "pp_size": pp_size,
        }  # fmt: skip
        options = {
            "pp_schedule": pp_schedule, "pp_stages_per_rank": pp_stages_per_rank, "pp_layers": pp_layers,
            "tp_plan": tp_plan, "ep_plan": ep_plan, "cpu_offload": cpu_offload,
            "reduce_each_micro_batch": reduce_each_micro_batch,
        }  # fmt: skip
        self.sharding = Mesh.of(sizes | options)
        self.fsdp_plan = fsdp_plan
        self.format = sharded.ShardedFormat(self)

    # ---- the mesh --------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        # With offload, gradients are in host memory when they are clipped.
        start_process_group(self, "cpu:gloo,cuda:nccl" if self.sharding.cpu_offload else None)
        sizes = self.mesh_sizes = self.sharding.sizes(self.world_size)
        dense = [axis.name for axis in AXES if axis.adds_ranks]
        set_mesh(self, self._mesh_of({name: sizes[name] for name in dense}))
        self.axes = dict(zip(dense, self.device_mesh.get_coordinate() or (), strict=True))
        efsdp = sizes.fsdp * sizes.tp // sizes.ep
        experts = {"pp": sizes.pp, "dp_replicate": sizes.dp_replicate, "efsdp": efsdp}
        others = {name: sizes[name] for name in dense if name not in ("fsdp", "tp", *experts)}
        self.expert_mesh = self._mesh_of(others | experts | {"ep": sizes.ep})
        if sizes.cp > 1:
            rows = self.world_size // sizes.pp // sizes.cp // sizes.tp
            parts = {"pp": sizes.pp, "batch": rows, "cp": sizes.cp, "tp": sizes.tp}
            self.sequence_group = self._mesh_of(parts).get_group("cp")
        if sizes.pp > 1:
            self.stages = self._mesh_of({"pp": sizes.pp, "of_stage": self.world_size // sizes.pp})

    def _mesh_of(self, sizes: Mapping[str, int]) -> DeviceMesh:
        device = self.root_device.type  # transformers' own function would use a GPU if there is one
        return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    @property
    def data_rank(self) -> DataRank:
        """Which part of the batches this rank reads: the same if ranks differ in pp, tp or cp."""
        number = self._number_along([a.name for a in AXES if a.reads_own_rows])
        size = self.sharding.data_parallel(self.world_size)
        return DataRank(number // self.mesh_sizes.cp, size)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.data_rank.size, "rank": self.data_rank.rank}

    @property
    def random_rank(self) -> int:
        """Tensor-parallel ranks share a random stream, which drops the same hidden states."""
        return self._number_along([a.name for a in AXES if a.adds_ranks and a.draws_own])

    def _number_along(self, names: list[str]) -> int:
        """Returns this rank's number among those that differ from it along `names` alone."""
        number = 0
        for name in names:
            number = number * self.mesh_sizes[name] + self.axes[name]
        return number

    def shard_batch(self, batch: T) -> T:
        """Returns the rank's part of the sequences of a batch; without cp, the batch."""
        return batch if self.mesh_sizes.cp == 1 else shard_batch(batch, self.sequence_group)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        return self.shard_batch(super().batch_to_device(batch, device, dataloader_idx))

    # ---- the model -------------------------------------------------------------------------------

    def connect(self, model: L.LightningModule) -> None:
        super().connect(model)
        if not is_overridden("configure_model", model):  # its layers are made in __init__
            set_configure_model(model, partial(shard_module, model, self))

    def teardown(self) -> None:
        if self.lightning_module is not None:
            set_configure_model(self.lightning_module, None)
        super().teardown()

    @property
    def shards(self) -> bool:
        return self.world_size > 1 or self.sharding.cpu_offload

    def shard(self, model: nn.Module) -> nn.Module:
        """Shards `model`, whose weights are on rank 0 only, over the mesh.

        Raises:
            InputError: the model's plans do not allow the configured sizes.
        """
        if not self.shards:
            return model
        refuse_scalars(model, "FSDP2")
        full = scatter.move_to_meta(model)
        try_rank(model, self)
        facts = self.sharding.stage_facts(model, self.world_size)
        division = divide(model, facts, self.stages.get_local_rank("pp")) if facts else None
        has_plan = hasattr(model, "maybe_distribute_model") and (self.fsdp_plan or model.fsdp_plan)
        if has_plan and self.world_size > 1:
            shard_by_plan(model, self)
        else:
            shard_by_blocks(model, self)
        device = torch.device("cpu") if self.sharding.cpu_offload else self.root_device
        scatter.materialize(model, full, device)
        if facts and division is not None:
            self.layers = Pipeline(model, division, self, facts)
        return model

    def model_to_device(self) -> None:
        assert self.model is not None
        if not self.sharding.cpu_offload:
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
        if self.layers.group is not None:  # a pipeline reduces by itself
            yield
            return
        self._set_reduces(False)
        try:
            yield
        finally:
            self._set_reduces(True)

    def _set_reduces(self, reduces: bool) -> None:
        assert self.model is not None
        if self.sharding.reduce_each_micro_batch and self.mesh_sizes.dp_replicate == 1:
            return
        for unit in self.model.modules():
            if isinstance(unit, FSDPModule):
                if self.sharding.reduce_each_micro_batch:
                    unit.set_requires_all_reduce(reduces, recurse=False)
                else:
                    unit.set_requires_gradient_sync(reduces, recurse=False)

    def training_step(self, *args: object, **kwargs: object) -> Any:
        return self.layers.training_step(super().training_step, (*args, *kwargs.values()))

    def validation_step(self, *args: object, **kwargs: object) -> Any:
        return self.layers.evaluate(super().validation_step, (*args, *kwargs.values()))

    def test_step(self, *args: object, **kwargs: object) -> Any:
        return self.layers.evaluate(super().test_step, (*args, *kwargs.values()))

    @property
    def replica_tolerance(self) -> float:
        """Under tensor parallelism every rank repeats what is not sharded, and kernels with atomics (a backward pass of
        attention) round differently each time. Under HSDP each replica sums the norm in a group of its own."""
        if self.mesh_sizes.tp > 1:
            return 1e-2
        return 1e-5 if self.mesh_sizes.dp_replicate > 1 else 0.0

    # ---- checkpoints -----------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None) -> None:
        self.format.save(checkpoint, Path(weights.broadcast(str(filepath))))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return formats.load(self.format, Path(checkpoint_path), weights_only)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.model is not None
        return sharded.optimizer_state(self.model, optimizer)
