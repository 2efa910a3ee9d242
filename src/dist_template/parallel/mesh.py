"""FSDP2, HSDP, tensor and expert parallelism: one mesh of ranks, and transformers' plans to cut a model over it.

    dense parameters    (dp_replicate, fsdp, tp)      experts    (dp_replicate, efsdp, ep),  efsdp = fsdp x tp / ep

A batch is dealt out over dp_replicate x fsdp ranks; the tp ranks of one such place share it. What is cut how stands in
the model's configuration (`base_model_tp_plan`, `base_model_ep_plan`, `base_model_fsdp_plan`), for every model that
transformers has. A model without plans is sharded block by block with torch's `fully_shard`, and so is a plain
LightningModule whose layers are made in `__init__`.

Lightning's ModelParallelStrategy starts the processes and runs the loop. It stops at a mesh of two dimensions, at
knowing no transformers model, at checkpoints of interleaved shards, and at a world of one rank; the rest stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from .. import weights
from ..checkpoint import sharded
from ..checkpoint.commit import agreed
from ..checkpoint.formats import format_of
from ..checkpoint.resume import load_foreign
from ..compat import transformers as compat
from ..compat.lightning import set_mesh, start_process_group
from ..errors import InputError, reason
from ..layout import refuse_scalars
from .blocks import find_blocks

Size = int | Literal["auto"]
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each dimension of the mesh; `ep` lies across fsdp and tp and adds no ranks."""

    dp_replicate: int
    fsdp: int
    tp: int
    ep: int

    @property
    def data_parallel(self) -> int:
        """Ranks that each see a batch of their own."""
        return self.dp_replicate * self.fsdp


class MeshStrategy(ModelParallelStrategy):
    """Shard a model over a mesh of ranks.

    Args:
        fsdp_size: Ranks over which parameters, gradients and optimizer state are sharded. auto: those the rest leaves.
        dp_replicate_size: Copies of that (HSDP), one a node as a rule. 1 is off. auto: those the rest leaves.
        tp_size: Ranks that share each matrix product (tensor parallelism), at most those of a node. 1 is off.
        ep_size: Ranks that hold distinct experts; a multiple of tp_size that divides fsdp_size x tp_size. 1 is off.
            auto: all of those.
        fsdp_plan: Rules over the model's own: module name to free_full_weight or keep_full_weight. null: none.
        tp_plan: Rules over the model's own: module or parameter name to a style of transformers'. null: none.
        ep_plan: The same for experts. null: none.
        cpu_offload: Keep parameters, gradients and optimizer state in host memory. false: on the device.
        reduce_each_micro_batch: Reduce-scatter gradients in every micro-batch of an accumulation and keep shards of
            them. false: only in the last one, which sends less and keeps whole gradients until then, 4 bytes a
            parameter on every device (2 in bf16-true).
        process_group_backend: torch's name of the backend. null: nccl on GPUs, gloo on CPUs.
        timeout: How long a collective may wait for the other ranks.
    """

    def __init__(
        self,
        fsdp_size: Size = "auto",
        dp_replicate_size: Size = 1,
        tp_size: Size = 1,
        ep_size: Size = 1,
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
        self.fsdp_plan = fsdp_plan
        self.tp_plan = tp_plan
        self.ep_plan = ep_plan
        self.cpu_offload = cpu_offload
        self.reduce_each_micro_batch = reduce_each_micro_batch

    # ---- the mesh ------------------------------------------------------------------------------------------------

    def sizes(self, world_size: int) -> MeshSizes:
        """The sizes on `world_size` ranks, "auto" resolved.

        Raises:
            InputError: they do not multiply to the number of ranks, or more than one is "auto".
        """
        given = {"dp_replicate_size": self.dp_replicate_size, "fsdp_size": self.fsdp_size, "tp_size": self.tp_size}
        numbers = {name: size for name, size in given.items() if size != "auto"}
        automatic = given.keys() - numbers.keys()
        known = prod(numbers.values())
        told = " x ".join(f"{name} {size}" for name, size in given.items())
        if len(automatic) > 1:
            raise InputError(f"{told}: only one of them can be auto; edit trainer.strategy.init_args")
        if min(numbers.values(), default=1) < 1 or world_size % known or (not automatic and known != world_size):
            raise InputError(
                f"{told} does not make {world_size}, the number of processes (trainer.devices x trainer.num_nodes);"
                f" edit trainer.strategy.init_args{'' if automatic else ', where one size may be auto'}"
            )
        numbers |= {name: world_size // known for name in automatic}
        replicate, fsdp, tp = (numbers[name] for name in given)
        return MeshSizes(replicate, fsdp, tp, fsdp * tp if self.ep_size == "auto" else self.ep_size)

    def setup_environment(self) -> None:
        # With offload, gradients are in host memory when they are clipped.
        start_process_group(self, "cpu:gloo,cuda:nccl" if self.cpu_offload else None)
        sizes = self.mesh_sizes = self.sizes(self.world_size)
        dense = (1, sizes.dp_replicate, sizes.fsdp, sizes.tp)
        experts = (1, sizes.dp_replicate, sizes.fsdp * sizes.tp // sizes.ep, sizes.ep)
        device = self.root_device.type  # transformers' own function would take a GPU wherever there is one
        set_mesh(self, init_device_mesh(device, dense, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")))
        self._expert_mesh = init_device_mesh(device, experts, mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Which share of the batches this rank reads: ranks that differ in tp alone read the same."""
        sizes = self.mesh_sizes
        return {"num_replicas": sizes.data_parallel, "rank": self.global_rank // sizes.tp}

    # ---- the model -----------------------------------------------------------------------------------------------

    def connect(self, model: L.LightningModule) -> None:
        super().connect(model)
        if not is_overridden("configure_model", model):  # its layers are made in __init__
            model.configure_model = partial(self._shard_module, model)

    def teardown(self) -> None:
        made = vars(self.lightning_module).get("configure_model") if self.lightning_module else None
        if isinstance(made, partial):
            del vars(self.lightning_module)["configure_model"]
        super().teardown()

    def _shard_module(self, module: L.LightningModule) -> None:
        """Shards the layers that a plain LightningModule has made on every rank, with rank 0's weights.

        The module itself is the outermost unit, so its steps gather what is in no block, as `forward` does elsewhere.
        """
        if isinstance(module, FSDPModule) or (self.world_size == 1 and not self.cpu_offload):
            return
        refuse_scalars(module, "FSDP2")
        self.precision_plugin.convert_module(module)
        module.to("cpu" if self.cpu_offload else self.root_device)
        weights.load(module, weights.named_tensors(module))
        self._shard(module, self._shard_by_blocks)
        for step in STEPS:
            if is_overridden(step, module):
                register_fsdp_forward_method(module, step)

    def shard(self, model: nn.Module) -> nn.Module:
        """Cut `model`, which has its weights on rank 0 alone, over the mesh.

        Raises:
            InputError: the model's plans do not allow what is asked.
        """
        if self.world_size == 1 and not self.cpu_offload:
            return model
        refuse_scalars(model, "FSDP2")
        whole = weights.take(model)
        has_plan = hasattr(model, "maybe_distribute_model") and (self.fsdp_plan or model.fsdp_plan)
        self._shard(model, self._shard_by_plan if has_plan and self.world_size > 1 else self._shard_by_blocks)
        weights.fill(model, whole, torch.device("cpu") if self.cpu_offload else self.root_device)
        return model

    def _shard(self, model: nn.Module, by: Callable[[Any], None]) -> None:
        try:
            by(model)
        except ValueError as error:
            raise InputError(f"{type(model).__name__} cannot be cut as configured: {reason(error)}") from error

    def _shard_by_plan(self, model: Any) -> None:
        from transformers.distributed import DistributedConfig
        from transformers.distributed.utils import TransformersDeviceMesh

        from ..compat import replicated_gradients

        replicated_gradients.register()
        sizes = self.mesh_sizes
        config = DistributedConfig(
            tp_size=sizes.tp,
            fsdp_size=sizes.fsdp,
            dp_replicate_size=sizes.dp_replicate,
            ep_size=sizes.ep,
            tp_plan=self.tp_plan,
            ep_plan=self.ep_plan,
            fsdp_plan=self.fsdp_plan,
            fsdp_cpu_offload=self.cpu_offload,
            fsdp_mixed_precision=self._mixed_precision,
        )
        ties = weights.find_ties(model)
        tied = {name for name, module in model.named_modules() if any(module is owner for t in ties for owner, _ in t)}
        # What is tied must be in one FSDP group, and is when no rule takes a part of it out of the root's.
        model.fsdp_plan = {name: style for name, style in model.fsdp_plan.items() if name not in tied}

        weights.untie(ties)  # tensor parallelism looks for each place's own
        with compat.sharding(self._offload_policy, prepare=lambda: weights.tie(ties)):
            model.maybe_distribute_model(model, config, TransformersDeviceMesh(self.device_mesh, self._expert_mesh))
        weights.tie(ties)

    def _offload_policy(self) -> CPUOffloadPolicy:
        return CPUOffloadPolicy(pin_memory=self.root_device.type == "cuda")

    def _shard_by_blocks(self, model: nn.Module) -> None:
        if self.mesh_sizes.tp > 1 or self.mesh_sizes.ep > 1:
            raise ValueError("it has no plan for tensor or expert parallelism, set tp_size and ep_size to 1")
        names = ("dp_replicate", "fsdp") if self.mesh_sizes.dp_replicate > 1 else ("fsdp",)
        options: dict[str, Any] = {
            "mesh": self.device_mesh[names],
            "offload_policy": self._offload_policy() if self.cpu_offload else OffloadPolicy(),
        }
        if self._mixed_precision:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in find_blocks(model):
            fully_shard(block, **options)
        if isinstance(model, L.LightningModule) and "mp_policy" in options:  # a step's batch holds targets too
            options["mp_policy"] = replace(options["mp_policy"], cast_forward_inputs=False)
        fully_shard(model, **options)

    def model_to_device(self) -> None:
        assert self.model is not None
        if not self.cpu_offload:
            super().model_to_device()
        for buffer in self.model.buffers():  # activations, and what meets them, stay on the device
            buffer.data = buffer.data.to(self.root_device)

    @property
    def _mixed_precision(self) -> bool:
        """Whether weights travel and multiply in bfloat16, kept and reduced in float32."""
        return self.precision_plugin.precision == "bf16-mixed"

    # ---- the step ------------------------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Lightning's, around every micro-batch but the last of an accumulation; its own knows DDP alone.

        HSDP's all-reduce between the copies always waits for the last: what it adds up meanwhile is the own shard, no
        larger than the gradient that it becomes.
        """
        assert self.model is not None
        waits = not self.reduce_each_micro_batch or self.mesh_sizes.dp_replicate > 1
        units = [module for module in self.model.modules() if isinstance(module, FSDPModule)] if waits else []
        self._let_reduce(units, False)
        try:
            yield
        finally:
            self._let_reduce(units, True)

    def _let_reduce(self, units: Sequence[FSDPModule], now: bool) -> None:
        for unit in units:
            if self.reduce_each_micro_batch:
                unit.set_requires_all_reduce(now, recurse=False)
            else:
                unit.set_requires_gradient_sync(now, recurse=False)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        sharded.save(checkpoint, Path(weights.broadcast(str(filepath))))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.model is not None and self.lightning_module is not None
        path = agreed(Path(checkpoint_path))
        if format_of(path) != "distributed":
            return load_foreign(self, path)
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        return sharded.load(path, self.model, self.optimizers if fits else [], weights_only)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        assert self.model is not None
        return sharded.optimizer_state(self.model, optimizer)
