"""Private names of DeepSpeed, and what it changes for the whole process. Verified on deepspeed
0.19.

tests/compat/test_names.py checks the names. Where one is gone, its function raises AttributeError
or ImportError, unless its docstring names a fallback. DeepSpeed is imported late."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn

from . import replaced
from .lightning import explained_optimizers

PIECE = 2**24  # elements that are compared at once


def without_shared_memory_collectives() -> None:
    """Keeps DeepSpeed from compiling its shared-memory collectives for CPUs, which takes a minute
    or two; it uses gloo's. No setting turns the build off: DeepSpeed caches whether it is
    compatible."""
    import deepspeed

    builder = deepspeed.accelerator.get_accelerator().create_op_builder("ShareMemCommBuilder")
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})[builder.NAME] = False


def undo_process_patches() -> None:
    """Undoes what ZeRO-3 and DeepSpeed's autocast change for the whole process and keep."""
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.zero import partition_parameters

    patched = partition_parameters.InsertPostInitMethodToModuleSubClasses
    torch.nn.functional.linear = getattr(patched, "linear_bk", torch.nn.functional.linear)
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False


@contextmanager
def without_broadcasts() -> Generator[None]:
    """Inside, ZeRO-3 partitions a rank's own parameters, not rank 0's; no setting does this."""
    from deepspeed.runtime.zero import partition_parameters

    with replaced(partition_parameters.dist, broadcast=lambda *_, **__: None):
        yield


def trace_full_forwards(engine: Any) -> None:
    """Starts ZeRO-3's trace of the modules' order at the beginning of a micro-batch only.

    DeepSpeed (0.19.8) starts it at each call of the LightningModule, and Lightning (2.6.6) calls it
    twice: once around `training_step`, which then calls `self(batch)`. A trace that starts in the
    middle does not match the next micro-batch: nothing is prefetched, and a step of two processes
    has 84 all-gathers in place of 21."""
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    offload.fwd_pre_hook.remove()

    def restart(*_: Any) -> None:
        offload.get_param_coordinator().reset_step()

    offload.fwd_pre_hook = engine.register_forward_pre_hook(restart)


def time_full_forwards(engine: Any) -> None:
    """Lets DeepSpeed's timers of forward (`wall_clock_breakdown`) run once in a micro-batch, around
    `training_step`.

    DeepSpeed (0.19.8) starts them at each call of the LightningModule, as ZeRO-3's trace, and the
    second start fails: the timer has already been started."""
    timers, start, stop = (
        engine.engine_timers.forward_timers,
        engine._start_timers,
        engine._stop_timers,
    )
    depth = 0

    def start_outermost(names: list[str]) -> None:
        nonlocal depth
        if names is timers:
            depth += 1
        if names is not timers or depth == 1:
            start(names)

    def stop_outermost(names: list[str]) -> None:
        nonlocal depth
        if names is not timers or depth == 1:
            stop(names)
        if names is timers:
            depth -= 1

    engine._start_timers, engine._stop_timers = start_outermost, stop_outermost


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Returns a parameter's gradient, or None if it has none; unsharded where DeepSpeed keeps it,
    and `.grad` is empty: under ZeRO-3, and in half precision under ZeRO-1 and 2. Collective."""
    if not (hasattr(parameter, "ds_tensor") or hasattr(parameter, "_hp_mapping")):
        return parameter.grad
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(parameter)


# ---- an optimizer step ---------------------------------------------------------------------------


def can_veto_steps(optimizer: Any) -> bool:
    """Whether this optimizer skips its next step if its attribute `vetoed` is True, as after an
    overflow; the loss scale is not lowered. The stages 1, 2 and 3 decide in `_update_scale`, after
    the norm and before the update. BF16_Optimizer (stage 1 that accumulates in fp32) has no such
    method: False, and gradients become NaN instead."""
    if not hasattr(optimizer, "_update_scale"):
        return False
    if not hasattr(optimizer, "vetoed"):
        update_scale = optimizer._update_scale

        def vetoed(has_overflow: bool = False) -> None:
            optimizer.found_overflow = has_overflow
            optimizer.overflow = has_overflow or optimizer.vetoed
            update_scale(has_overflow)

        optimizer._update_scale = vetoed
    return True


# ---- checkpoints ---------------------------------------------------------------------------------


@contextmanager
def redirected_saves(engine: Any, take: Callable[[Any, Path], None]) -> Generator[None]:
    """Inside, `engine.save_checkpoint` passes each file's content and path to `take` and writes
    nothing itself: DeepSpeed's JSON chooses its checkpoint engine, which cannot be passed in."""
    files = engine.checkpoint_engine

    def save(state_dict: Any, path: Any) -> None:
        take(state_dict, Path(path))

    with (
        replaced(files, save=save, makedirs=lambda *_, **__: None),
        replaced(engine, _copy_recovery_script=lambda folder: None),
    ):
        yield


@contextmanager
def converted_loads(engine: Any, convert: Callable[[Any], Any]) -> Generator[None]:
    """Inside, `engine.load_checkpoint` loads into the module what `convert` returns of its saved
    state dict."""
    load = engine.load_module_state_dict

    def load_converted(checkpoint: Any, **options: Any) -> None:
        load(checkpoint | {"module": convert(checkpoint["module"])}, **options)

    with replaced(engine, load_module_state_dict=load_converted):
        yield


def fragment_of(parameter: Any) -> tuple[int, int]:
    """Returns which elements of a flattened parameter are in this rank's partition under ZeRO-1 and
    2."""
    if parameter._hp_mapping is None:
        return 0, 0
    fragment = parameter._hp_mapping.lp_fragment_address
    return fragment.start, fragment.start + fragment.numel


def link_optimizer_state(optimizer: Any) -> None:
    """Lets `safe_set_full_optimizer_state` reach state that was created after the first link.
    ZeRO-3 does not link and lacks the name."""
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def take_over_weights(optimizer: Any) -> None:
    """Copies what a module's code has changed in its weights to the partitions that DeepSpeed's
    optimizer (ZeRO-1 and 2) updates: DeepSpeed (0.19.8) writes all weights from them after each
    step, so that a clamped weight would be as before. `refresh_fp32_params` would round the rest
    to half precision. No synchronization with the host."""
    if not hasattr(optimizer, "parallel_partitioned_bit16_groups"):
        return
    for number, own in enumerate(optimizer.single_partition_of_fp32_groups):
        rank = dist.get_rank(optimizer.real_dp_process_group[number])
        given = optimizer.parallel_partitioned_bit16_groups[number][rank]
        pairs = zip(given.detach().split(PIECE), own.detach().split(PIECE), strict=True)
        for new, old in pairs:
            new = new.to(old.device)
            old.copy_(torch.where(new != old.to(new.dtype), new.to(old.dtype), old))


# ---- Lightning's strategy
# --------------------------------------------------------------------------


def start_deepspeed(strategy: DeepSpeedStrategy) -> None:
    """Starts DeepSpeed's process group; the public `setup_distributed` refuses CPUs."""
    strategy._init_deepspeed_distributed()


def set_deepspeed_config(strategy: DeepSpeedStrategy, make: Callable[[], dict[str, Any]]) -> None:
    """Sets DeepSpeed's configuration to the result of `make`, once, before Lightning (2.6) adds the
    accumulation and clipping, without a hook for more."""
    if not strategy._config_initialized:
        strategy.config = make()
        strategy._config_initialized = True


class EngineStrategy(DeepSpeedStrategy):
    """Lightning's strategy for a module with any number of schedules: Lightning (2.6.6) refuses
    more than one, because it passes them to DeepSpeed, and then keeps DeepSpeed from stepping
    them."""

    def check_machine(self) -> None:
        """Raises InputError if this machine cannot train so, before other processes start."""

    def _configure_launcher(self) -> None:
        self.check_machine()
        super()._configure_launcher()

    def check_optimizers(self, optimizers: list[Any]) -> None:
        """Raises InputError if the engine cannot run them."""

    def _init_optimizers(self) -> tuple[Any, None]:
        assert self.lightning_module is not None
        with explained_optimizers(self.lightning_module):
            optimizers, schedules = _init_optimizers_and_lr_schedulers(self.lightning_module)
        self.check_optimizers(optimizers)
        self._schedules = schedules
        return optimizers[0], None

    def _initialize_deepspeed_train(self, model: nn.Module) -> None:
        super()._initialize_deepspeed_train(model)
        self.lr_scheduler_configs = self._schedules  # Lightning's loop steps them


class EnginePrecision(DeepSpeedPrecision):
    """Lightning's precision plugin for an engine that clips by itself."""

    def _clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed clips after its reduction; in stage 1, `.grad` is a shard until then."""

    def use_dtype(self, dtype: torch.dtype) -> None:
        """Sets the type of inputs and new tensors (Lightning's is from the precision's name)."""
        self._desired_dtype = dtype
