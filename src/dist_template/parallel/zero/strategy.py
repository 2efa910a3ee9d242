"""ZeRO by DeepSpeed, on any accelerator.

Lightning's DeepSpeedStrategy starts the processes and builds the engine. It refuses CPUs, starts
ZeRO-3 from uninitialized weights, divides gradients by the accumulation twice (AdamW hides it, norm
and clipping do not), and lets a module clip gradients before they are reduced; this file changes
that."""

import math
import os
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, Literal, NoReturn

import lightning as L
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from ...checkpoint.frozen import KEY, REFERENCE
from ...compat import deepspeed as compat
from ...compat.deepspeed import EnginePrecision, set_deepspeed_config, start_deepspeed
from ...compat.lightning import accumulates
from ...compat.torch import drop_weak_references
from ...errors import InputError, require
from ...layout import refuse_unshardable
from ...ranges import NonNegativeInt, PositiveInt
from ..configured import Configured, Hardware, is_users
from ..element_wise import is_element_wise, is_known
from ..own_code import code_of
from ..own_format import OwnFormat
from ..rank_view import RankView
from ..starting import Start
from . import check as deepspeed_check
from . import json as config_file

# module.py leaves clipping to DeepSpeed; DeepSpeed 0.19 with torch 2.13
warnings.filterwarnings("ignore", message=".*DeepSpeed handles gradient clipping internally.*")
warnings.filterwarnings(
    "ignore", message=".*torch.distributed.(all_gather_into|reduce_scatter)_tensor. is deprecated.*"
)

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before jsonargparse imports DeepSpeed

Config = dict[str, Any]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ZeroPrecision(EnginePrecision):
    """Lets DeepSpeed cast parameters, clip, and average over an accumulation."""

    def __init__(self, precision: Any, autocast: bool) -> None:
        super().__init__(precision)
        if autocast:
            self.use_dtype(torch.float32)  # autocast casts in each operation

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module  # DeepSpeed casts parameters, and keeps buffers in fp32

    def backward(self, tensor: Tensor, model: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Backpropagates by the engine, and finishes a micro-batch that no optimizer step follows.
        The engine must see every micro-batch; the module's hooks of a step run once per step."""
        kwargs["scale_wrt_gas"] = False  # Lightning has divided the loss already
        engine = _engine(model)
        is_last = not accumulates(model.trainer)
        num_batches = model.trainer.accumulate_grad_batches
        if num_batches != engine.gradient_accumulation_steps():  # a growing batch
            engine.set_train_batch_size(
                num_batches * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
            )
            engine.optimizer.gradient_accumulation_steps = num_batches
        engine.set_gradient_accumulation_boundary(is_last)
        super().backward(tensor, model, *args, **kwargs)
        if not is_last:
            engine.step()

    def optimizer_step(
        self, optimizer: Any, model: L.LightningModule, closure: Any, **kwargs: Any
    ) -> object:
        engine = _engine(model)
        strategy: Any = model.trainer.strategy

        def forward_and_backward() -> object:
            result = closure()
            strategy.take_over_weights()
            return result

        result = super().optimizer_step(optimizer, model, forward_and_backward, **kwargs)
        if getattr(engine.optimizer, "cpu_offload", False) and engine.optimizer.overflow:
            # DeepSpeed 0.19.8 clears them only without offload; in bf16 the next step adds them.
            engine.optimizer.averaged_gradients = dict.fromkeys(engine.optimizer.averaged_gradients)
        return result

    def skip_step(self, model: L.LightningModule, anomalous: Tensor) -> None:
        """Skips the engine's next step where `anomalous` () is true; equal on all ranks. The step
        is handled like an overflow in fp16: gradients are cleared, weights and moments stay.
        `anomalous` is read on the host; DeepSpeed reads the gradients' norm there in every step
        anyway."""
        engine = _engine(model)
        optimizer, skips = engine.optimizer, bool(anomalous)
        if (
            not compat.can_veto_steps(optimizer) and skips
        ):  # a norm that is NaN makes it skip the step
            for gradients in optimizer.fp32_groups_gradients_flat:
                gradients.fill_(math.nan)
        optimizer.vetoed = skips

    @staticmethod
    def outcome(model: L.LightningModule) -> tuple[bool, float]:
        """Returns whether the newest step's gradients were non-finite, and their norm, or -1."""
        engine = _engine(model)
        skipped, vetoed = engine.optimizer.overflow, engine.optimizer.vetoed
        if getattr(engine.optimizer, "found_overflow", skipped and not vetoed):
            return True, math.inf
        return False, -1.0 if skipped else float(engine.get_global_grad_norm())


class ZeroStrategy(RankView, OwnFormat, compat.EngineStrategy):
    """Shards by DeepSpeed's ZeRO.

    Offloaded state is updated by torch's fused AdamW on the CPU, not by DeepSpeed's: the results
    are equal, nothing is compiled at the start, and the module's own optimizer runs. Half precision
    is DeepSpeed's, under `-mixed` and `-true` alike: weights in bf16 or fp16, and sharded fp32
    weights that the optimizer updates.

    Args:
        stage: 1 shards optimizer state, 2 gradients too, 3 parameters too. null: 2.
        offload_optimizer: Keep and update optimizer state in host memory. null: false.
        offload_parameters: Keep parameters there too, stage 3 only. null: false.
        pin_memory: Page-lock that memory, so that copies overlap computation. auto: if there is a
            GPU.
        config: A DeepSpeed JSON file, or its content, which replaces the other arguments. null:
            these arguments.
        sub_group_size: Elements updated at once in stage 3; limits the memory of an offloaded
            update.
        prefetch_bucket_size: Elements gathered ahead of use in stage 3, which hides communication.
        param_persistence_threshold: Smaller parameters (elements: norms, biases, routers) stay
            unsharded in stage 3: a collective would cost more than their memory."""

    NAMES: ClassVar[dict[str, dict[str, Any]]] = {  # in Lightning's registry, with arguments
        "zero1": {"stage": 1},
        "zero2": {"stage": 2},
        "zero2_offload": {"stage": 2, "offload_optimizer": True},
        "zero3": {"stage": 3},
        "zero3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    }

    def __init__(
        self,
        stage: Literal[1, 2, 3] | None = None,
        offload_optimizer: bool | None = None,
        offload_parameters: bool | None = None,
        pin_memory: bool | Literal["auto"] = "auto",
        config: str | dict[str, Any] | None = None,
        sub_group_size: PositiveInt = 1_000_000_000,
        prefetch_bucket_size: NonNegativeInt = 50_000_000,
        param_persistence_threshold: NonNegativeInt = 100_000,
        **kwargs: Any,
    ) -> None:
        require("deepspeed", "ZeroStrategy")
        super().__init__(
            stage=stage or 2,
            offload_optimizer=bool(offload_optimizer),
            offload_parameters=bool(offload_parameters),
            pin_memory=pin_memory,  # ty: ignore[invalid-argument-type]
            config=None if config is None else config_file.read(config),
            sub_group_size=sub_group_size,
            **kwargs,
        )
        assert isinstance(self.config, dict)
        self._given, zero = self.config, self.config["zero_optimization"]
        self.arguments = {"config": self._given}  # for spec_of
        # Lightning's arguments set it to true; here it counts if a file says so.
        is_given = config is not None
        self._allows_untested = is_given and self._given.get("zero_allow_untested_optimizer", False)
        if config is None:
            if zero["stage"] > 1:  # in stage 1 it would select another DeepSpeed optimizer
                self.config["data_types"] = {"grad_accum_dtype": "fp32"}
            if zero["stage"] == 3:
                zero["stage3_prefetch_bucket_size"] = prefetch_bucket_size
                zero["stage3_param_persistence_threshold"] = param_persistence_threshold
                zero["stage3_gather_16bit_weights_on_model_save"] = True

    # ---- the configuration -----------------------------------------------------------------------

    def complete_config(self, setup: Configured) -> Config:
        """Returns the configuration that DeepSpeed gets in the training of `setup`."""
        config = config_file.resolve(self._given, setup)
        if config.get("fp16", {}).get("enabled"):
            names = "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale"
            config["fp16"] = {name: getattr(self, name) for name in names.split()} | config["fp16"]
        return config

    def _config_of_trainer(self) -> Config:
        module = self.lightning_module
        assert module is not None
        trainer: Any = module.trainer
        machine = Hardware(
            self.root_device.type, self.world_size, precision=self.precision_plugin.precision
        )
        keys = {
            key: getattr(trainer, key) for key in ("accumulate_grad_batches", "gradient_clip_val")
        }
        return self.complete_config(
            Configured(machine, keys, module, trainer.datamodule, None, trains=True)
        )

    # ---- the machine -----------------------------------------------------------------------------

    def check_machine(self) -> None:
        if why := deepspeed_check.lacks_on_this_machine(self._given):
            raise InputError(f"{config_file.KEY}: {why}")

    @property
    def root_device(self) -> torch.device:
        """This rank's device, with the index that DeepSpeed needs also for a CPU."""
        device = super().root_device
        return device if device.index is not None else torch.device(device.type, self.local_rank)

    def setup_environment(self) -> None:
        autocast = self._given.get("torch_autocast", {}).get("enabled", False)
        self.precision_plugin = ZeroPrecision(self.precision_plugin.precision, autocast)
        super(DeepSpeedStrategy, self).setup_environment()  # DeepSpeedStrategy's refuses CPUs

    def setup_distributed(self) -> None:
        if self.root_device.type != "cpu":
            super().setup_distributed()
            return
        import deepspeed
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        # There may be a GPU that is not to be used.
        if deepspeed.accelerator.get_accelerator().device_name() != "cpu":
            deepspeed.accelerator.set_accelerator(CPU_Accelerator())
        precision = self.precision_plugin.precision
        is_fp16 = config_file.HALF_SECTION.get(precision) == "fp16"
        if is_fp16 and not deepspeed.accelerator.get_accelerator().is_fp16_supported():
            raise InputError(
                f"trainer.precision {precision!r}: this CPU has no fp16 for DeepSpeed; train on"
                " GPUs, or set bf16-mixed here and bf16 in a DeepSpeed JSON"
            )
        compat.without_shared_memory_collectives()
        reset_seed()
        self.set_world_ranks()
        start_deepspeed(self)

    def teardown(self) -> None:
        """Restores the process, so that it can run another strategy."""
        super().teardown()
        compat.undo_process_patches()

    # ---- the model -------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer) -> None:
        # before Lightning completes it from the arguments
        set_deepspeed_config(self, self._config_of_trainer)
        assert self.lightning_module is not None
        refuse_unshardable(self.lightning_module, "DeepSpeed")
        for name, parameter in self.lightning_module.named_parameters():
            if parameter.dtype == torch.float64:  # DeepSpeed would cast it
                raise InputError(
                    f"{name} of {type(self.lightning_module).__name__} is of torch.float64, and"
                    " DeepSpeed trains in single precision: convert it, or set trainer.strategy to"
                    " ddp"
                )
        if self.zero_stage_3:  # DeepSpeed does not move back what teardown moved to the host
            for tensor in (*self.lightning_module.parameters(), *self.lightning_module.buffers()):
                tensor.data = tensor.data.to(self.root_device)
        super().setup(trainer)

    @contextmanager
    def model_sharded_context(self) -> Generator[None]:
        """Does nothing: partitioned parameters could not be initialized."""
        yield

    def shard(self, start: Start) -> nn.Module:
        """Gives every rank the weights of `start`, in stage 3 its shard of them. Ties are kept."""
        import deepspeed

        model = start.model
        refuse_unshardable(model, "DeepSpeed")
        if any(getattr(self.lightning_module, key, None) for key in (KEY, REFERENCE)):
            self.exclude_frozen_parameters = True
        set_deepspeed_config(self, self._config_of_trainer)
        assert isinstance(self.config, dict)
        swapper = None  # for NVMe, one for all parameters
        half = next((d for s, d in HALF.items() if self.config.get(s, {}).get("enabled")), None)
        for module in reversed(list(model.modules())):  # zero.Init also partitions children
            own = [p for p in module.parameters(recurse=False) if not hasattr(p, "ds_id")]
            drop_weak_references(module)
            for tensor in [*own, *module.buffers(recurse=False)]:
                _allocate(tensor, self.root_device)
            if self.zero_stage_3 and own:
                for parameter in own if half else ():  # the engine casts only unpartitioned ones
                    if parameter.is_floating_point():
                        parameter.data = parameter.data.to(half)
                options = {"config_dict_or_path": self.config, "param_swapper": swapper}
                with compat.without_broadcasts():  # of memory without values
                    swapper = deepspeed.zero.Init(module=module, **options).param_swapper
        start.fill(model)
        return model

    def check_optimizers(self, optimizers: list[Any]) -> None:
        """Refuses what DeepSpeed cannot run, or would run wrongly without an error."""
        optimizer = optimizers[0]
        name = type(optimizer).__name__
        if not any(group["params"] for group in optimizer.param_groups):
            raise InputError(
                "configure_optimizers returns no optimizer, and DeepSpeed trains with one: return"
                " one, or use --config strategy/ddp"
            )
        if self._allows_untested or is_known(optimizer):
            return
        if not is_element_wise(optimizer):
            raise InputError(
                f"{name} of configure_optimizers does not work under ZeRO, which flattens"
                " parameters and passes each rank a part: that needs an optimizer that updates each"
                " element by itself, such as AdamW or SGD; return one, or use --config"
                " strategy/fsdp2 or strategy/ddp"
            )

    @property
    def keeps_trainable(self) -> bool:
        """The engine partitions the optimizer's parameters when it is made."""
        return True

    def change_trainable(self, changed: Mapping[str, bool]) -> None:
        name, is_trained = next(iter(changed.items()))
        raise InputError(
            f"{name} ({len(changed)} such) was {'unfrozen' if is_trained else 'frozen'} in"
            " training, and DeepSpeed trains the parameters that are trainable at its start: give"
            " them a group whose lr is 0 until then, or use --config strategy/ddp or"
            " strategy/fsdp2"
        )

    def init_deepspeed(self) -> None:
        super().init_deepspeed()
        # LearningRateMonitor(log_momentum=True) asks DeepSpeed's wrapper for the defaults.
        wrapper = self.deepspeed_engine.optimizer
        if hasattr(wrapper, "optimizer"):
            wrapper.defaults = wrapper.optimizer.defaults
            wrapper.add_param_group = _refuse_group
        if self.zero_stage_3:
            compat.trace_full_forwards(self.deepspeed_engine)
        if self.deepspeed_engine.wall_clock_breakdown():
            compat.time_full_forwards(self.deepspeed_engine)

    def take_over_weights(self) -> None:
        """Lets the engine train on with weights that a hook has changed since the newest step."""
        if self._may_change_weights:
            compat.take_over_weights(self.deepspeed_engine.optimizer)

    @cached_property
    def _may_change_weights(self) -> bool:
        """Whether code of the user's may do so; where none does, nothing is compared."""
        trainer: Any = self.lightning_module.trainer if self.lightning_module else None
        kinds = {type(each) for each in (self.lightning_module, *trainer.callbacks)}
        users = [kind for kind in kinds if is_users(kind)]
        codes = [code_of(kind) for kind in users]
        return any(code is None or code.may_change_weights() for code in codes)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns {}: the engine writes the state of its optimizer by itself (format.py), and a
        copy for Lightning's dict would be thrown away."""
        return {}

    # ---- the step --------------------------------------------------------------------------------

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: the module's `optimizer_step` would run in every micro-batch (ZeroPrecision)."""
        return False

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        yield  # stages 2 and 3 reduce gradients in every micro-batch

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], object], model: Any = None, **kwargs: Any
    ) -> object:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if track := getattr(self.lightning_module, "track", None):
            norm = self.deepspeed_engine.get_global_grad_norm()
            track("train/grad_norm", torch.as_tensor(norm, device=self.root_device))
        return result


def _refuse_group(_: dict[str, Any]) -> NoReturn:
    raise InputError(
        "a group of parameters was added to the optimizer in training, and DeepSpeed's groups are"
        " fixed when training starts: make all groups in configure_optimizers, with lr 0 until they"
        " are to be trained, or use --config strategy/ddp or strategy/fsdp2"
    )


def _engine(module: L.LightningModule) -> Any:
    return module.trainer.model


def _allocate(tensor: Tensor, device: torch.device) -> None:
    """Gives a meta tensor memory on `device`, in place. Ties are kept."""
    if not tensor.is_meta:
        return
    real = torch.empty_like(tensor, device=device, memory_format=torch.contiguous_format)
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, tensor.requires_grad)
    real.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, real)
