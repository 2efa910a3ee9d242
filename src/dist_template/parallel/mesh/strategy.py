"""FSDP2, HSDP, tensor, expert and pipeline parallelism on one mesh of ranks.

    dense parameters    (pp, dp_replicate, fsdp, tp)
    experts             (pp, dp_replicate, efsdp, ep),  efsdp = fsdp x tp / ep

A batch is distributed over dp_replicate x fsdp / cp ranks. Ranks that differ only in pp or tp get
the same rows, and so do cp neighbours along fsdp, which share each sequence (sequence.py); the
folder pipeline/ runs the stages of pp. For every model of transformers, the plan in its
configuration determines how each parameter is sharded (`base_model_tp_plan`, `base_model_ep_plan`,
`base_model_fsdp_plan`). A model without plans is sharded block by block with torch's `fully_shard`,
and so is a plain LightningModule whose layers are made in `__init__`.

Lightning's ModelParallelStrategy starts the processes and runs the loop. It has a mesh of two
dimensions only, does not know transformers' plans, cannot save strided shards, and refuses a single
rank; this file adds that."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from ...checkpoint.protocol import FLAT
from ...compat.lightning import set_configure_model, torch_optimizer
from ...errors import InputError
from ...layout import refuse_unshardable
from .. import scatter
from ..configured import ARGS, overrides
from ..element_wise import is_known, why_not_on_shards
from ..own_code import code_of
from ..spec import spec_of
from ..spec.refusals import manual_refusal
from ..starting import Start
from .axes import ReplicaAxis, TensorAxis, all_axes
from .axes.axis import Size
from .manual import ManualSteps
from .pipeline.division import Division
from .pipeline.partition import facts_of
from .pipeline.run import Pipeline
from .pipeline.stages import LayerSplit, Schedule, bounds_between
from .ranks import MeshRanks
from .shard import complete_plan, shard_by_blocks, shard_by_plan, shard_module

State = dict[str, Any]  # of a module, an optimizer or a training


class MeshStrategy(MeshRanks):
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
        pp_size: Ranks that each hold some of the blocks (pipeline parallelism). 1: off.
        pp_schedule: The order of micro-batches. GPipe, 1F1B: one stage on each rank.
            Interleaved1F1B, InterleavedZeroBubble: several. ZBVZeroBubble, DualPipeV: two, of which
            rank 0 has the first and the last. Zero bubble and DualPipeV compute the gradients of
            weights while they would wait.
        pp_stages_per_rank: Stages of each rank in the interleaved schedules, 2 or more.
        pp_layers: Blocks of each stage, in order. even: equally many. cost: fewer in the last
            stage, which has the output layer.
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
        sizes: Of axes that packages add (docs/extend.md), by their keys."""

    NAMES: ClassVar[dict[str, dict[str, Any]]] = {  # in Lightning's registry, with arguments
        "fsdp2": {},
        "fsdp2_offload": {"cpu_offload": True},
        "hsdp": {ReplicaAxis.key: 2},
        "fsdp2_tp": {TensorAxis.key: 2},
    }

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
        pp_layers: LayerSplit = "cost",
        tp_plan: dict[str, str] | None = None,
        ep_plan: dict[str, str] | None = None,
        cpu_offload: bool = False,
        reduce_each_micro_batch: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
        **sizes: Size,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        if unknown := sizes.keys() - {axis.key for axis in all_axes()}:
            keys = ", ".join(f"{ARGS}.{name}" for name in sorted(unknown))
            raise InputError(f"MeshStrategy has no {keys}: remove it")
        self.arguments = sizes | {
            "fsdp_size": fsdp_size,
            "dp_replicate_size": dp_replicate_size,
            "tp_size": tp_size,
            "ep_size": ep_size,
            "cp_size": cp_size,
            "pp_size": pp_size,
            "pp_schedule": pp_schedule,
            "pp_layers": pp_layers,
            "pp_stages_per_rank": pp_stages_per_rank,
            "tp_plan": tp_plan,
            "ep_plan": ep_plan,
            "cpu_offload": cpu_offload,
            "reduce_each_micro_batch": reduce_each_micro_batch,
        }
        self._has_placed = False  # a network, by `place`
        self._manual: ManualSteps | None = None  # of a module that optimizes manually
        self.pp_schedule = pp_schedule
        self.tp_plan, self.ep_plan, self.cpu_offload = tp_plan, ep_plan, cpu_offload
        self.reduce_each_micro_batch = reduce_each_micro_batch

    # ---- the model -------------------------------------------------------------------------------

    def connect(self, model: L.LightningModule) -> None:
        super().connect(model)
        # LayerSplit are made in __init__, or by the module's own hook, which may place them itself.
        own = model.configure_model if is_overridden("configure_model", model) else None
        set_configure_model(model, partial(self._configure, model, own))

    def _configure(self, model: L.LightningModule, own: Callable[[], None] | None) -> None:
        if own is not None:
            own()
        if not self._has_placed:
            shard_module(model, self)
        if self.shards and not model.automatic_optimization:
            if why := spec_of(self).why_not_manual(self.world_size):
                raise InputError(manual_refusal(type(model).__name__, why))
            units = (unit for unit in model.modules() if isinstance(unit, FSDPModule))
            root = next(units, None)
            if root is not None:
                self._manual = ManualSteps(root)

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """Tries an optimizer of the module's own on shards. Raises InputError if it needs full
        parameters."""
        super().setup_optimizers(trainer)
        module, hook = self.lightning_module, "configure_optimizers"
        if not self.shards or not overrides(module, hook):
            return
        code = code_of(type(module))
        if code is not None and code.calls_original(hook):
            return  # optim.py builds it, and knows the layouts
        for optimizer in map(torch_optimizer, self.optimizers):
            if not optimizer.param_groups:
                raise InputError(
                    "configure_optimizers returns no optimizer, whose state MeshStrategy's"
                    " checkpoints have: return one, or use --config strategy/ddp or one device"
                )
            if is_known(optimizer):
                continue
            assert self.device_mesh is not None
            if why := why_not_on_shards(optimizer, self.device_mesh["fsdp"]):
                raise InputError(
                    f"{type(optimizer).__name__} of configure_optimizers does not work under"
                    f" MeshStrategy, which shards parameters ({why}): return an optimizer that"
                    " updates each element by itself, such as AdamW or SGD, or use --config"
                    " strategy/ddp or one device"
                )

    def teardown(self) -> None:
        if self.lightning_module is not None:
            set_configure_model(self.lightning_module, None)
        self._manual = None
        super().teardown()

    def shard(self, start: Start) -> nn.Module:
        """Shards the model of `start` over the mesh. Raises InputError if its plans do not allow
        the sizes."""
        self._has_placed = True
        if not self.shards:
            return super().shard(start)
        model: Any = start.model
        refuse_unshardable(model, "FSDP2")
        if self.mesh_sizes.tp > 1 and getattr(model, "tp_plan", None):
            expert_rules = (
                {**model.ep_plan, **(self.ep_plan or {})} if self.mesh_sizes.ep > 1 else {}
            )
            complete_plan(model, {**model.tp_plan, **(self.tp_plan or {}), **expert_rules})
        facts = division = None
        if self.mesh_sizes.pp > 1:
            options = (
                self.arguments[f"pp_{key}"] for key in ("schedule", "stages_per_rank", "layers")
            )
            facts = facts_of(model, self.mesh_sizes.pp, *options)
            here = facts["stages"][self.stages.get_local_rank("pp")]
            division = Division(model, bounds_between(facts["blocks"]), here, self.root_device)
        has_plan = hasattr(model, "maybe_distribute_model") and model.fsdp_plan
        if has_plan and self.world_size > 1:
            shard_by_plan(model, self)
        else:
            shard_by_blocks(model, self)
        scatter.allocate(model, torch.device("cpu") if self.cpu_offload else self.root_device)
        start.fill(model, self.stages.get_group("of_stage") if facts else None)
        if facts and division is not None:
            self.layers = Pipeline(model, division, self, facts)
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
        """Lightning enters it around every micro-batch but the last of an accumulation. HSDP's
        all-reduce between the replicas is always delayed to the last micro-batch: until then only
        this rank's shard is accumulated."""
        assert self.model is not None
        units = [unit for unit in self.model.modules() if isinstance(unit, FSDPModule)]
        if self.layers.group is not None:  # a pipeline reduces by itself
            units = []
        self._set_reduces(units, False)
        try:
            yield
        finally:
            self._set_reduces(units, True)

    def _set_reduces(self, units: Sequence[FSDPModule], reduces: bool) -> None:
        for unit in units:
            if not self.reduce_each_micro_batch:
                unit.set_requires_gradient_sync(reduces, recurse=False)
            elif self.mesh_sizes.dp_replicate > 1:
                unit.set_requires_all_reduce(reduces, recurse=False)

    def training_step(self, *args: object, **kwargs: object) -> Any:
        if self._manual is not None:
            with self._manual.step():
                return super().training_step(*args, **kwargs)
        return self.layers.training_step(super().training_step, (*args, *kwargs.values()))

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._manual is None:
            return super().backward(closure_loss, *args, **kwargs)
        run = super().backward
        self._manual.backward(closure_loss, lambda loss: run(loss, *args, **kwargs))
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, *args, **kwargs)
        if self._manual is not None:
            self._manual.after_step(torch_optimizer(optimizer))
        return output

    def validation_step(self, *args: object, **kwargs: object) -> Any:
        return self.layers.evaluate(super().validation_step, (*args, *kwargs.values()))

    def test_step(self, *args: object, **kwargs: object) -> Any:
        return self.layers.evaluate(super().test_step, (*args, *kwargs.values()))

    @property
    def replica_tolerance(self) -> float:
        """Under tensor parallelism every rank repeats what is not sharded, and kernels with atomics
        (a backward pass of attention) round differently each time. Under HSDP each replica sums the
        norm in a group of its own."""
        if self.mesh_sizes.tp > 1:
            return 1e-2
        return 1e-5 if self.mesh_sizes.dp_replicate > 1 else 0.0

    # ---- checkpoints -----------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> State:
        assert self.model is not None
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Optimizer) -> State:
        """Returns AdamW's moments by parameter name, each sharded like its parameter."""
        assert self.model is not None
        return get_optimizer_state_dict(self.model, torch_optimizer(optimizer), options=FLAT)
