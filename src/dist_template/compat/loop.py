"""Lightning's training loop with less overhead: the same hooks in the same order, the same state.

For each hook of each callback, also empty ones, Lightning (2.6.6) formats a debug message, enters a
profiler's context and writes the hook's name to the module twice: a hundred times a batch. In each
batch it determines again which hooks exist, what arguments they take and whether there is
validation. This file does so once, when an epoch starts.

The classes are subclasses of Lightning's, which handle the rare cases: the first batch of a resumed
epoch, validation, manual optimization, `dataloader_iter`, a schedule that is not stepped once per
optimizer step. With a profiler, only epochs.py is used."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher, _profile_nothing
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.plugins import precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer

from .epochs import Optimization as OfSteps
from .epochs import ResumableEpochLoop, make_resumable
from .steps import StepCallback
from .torch import step_of

NO_GAPS = "one rank cannot skip a step that all ranks take together"
BATCH_END = "on_train_batch_end"
OF_EACH_BATCH = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    BATCH_END,
)


def lighten(trainer: Any) -> None:
    """Gives `trainer` the loops of this folder; with a profiler, Lightning's own epoch loop."""
    if not isinstance(trainer.profiler, PassThroughProfiler):
        make_resumable(trainer)
        return
    make_resumable(trainer, EpochLoop)
    plugin = trainer.strategy.precision_plugin
    if type(plugin) is precision.Precision:
        trainer.strategy.precision_plugin = Precision()
    elif type(plugin) is precision.MixedPrecision:
        new = MixedPrecision(plugin.precision, plugin.device, plugin.scaler)
        trainer.strategy.precision_plugin = new


def overridden_hook(owner: Any, name: str, base: type) -> Any:
    """Returns the hook `name` of `owner`, or None if it is the empty one of `base`."""
    hook = getattr(owner, name)
    return None if getattr(hook, "__func__", None) is getattr(base, name) else hook


def call(module: Any, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function`, in which `self.log` knows the hook's name."""
    before, vars(module)["_current_fx_name"] = module._current_fx_name, name
    output = function(*args)
    vars(module)["_current_fx_name"] = before
    return output


class EpochLoop(ResumableEpochLoop):
    """`advance` and what it calls in each batch."""

    _accumulates: bool | None = None  # in this batch; None: Lightning must be asked
    _validates: bool | None = None  # in this epoch
    _is_ours = False  # not manual optimization, nor `dataloader_iter`

    def __init__(self, trainer: Any, *steps: Any) -> None:
        super().__init__(trainer, *steps)
        self.automatic_optimization = Optimization(trainer)

    @property
    def global_step(self) -> int:
        if self._is_ours:  # callbacks ask for it seven times a step
            return self.automatic_optimization.optim_progress.optimizer.step.total.completed
        return super().global_step

    def run(self, data_fetcher: Any) -> None:
        try:
            super().run(data_fetcher)
        finally:
            self._accumulates = self._validates = None

    def on_run_start(self, data_fetcher: Any) -> None:
        """Finds, when an epoch starts, what does not change in it."""
        super().on_run_start(data_fetcher)
        trainer: Any = self.trainer
        module = self._module = trainer.lightning_module
        data_fetcher._start_profiler = data_fetcher._stop_profiler = _profile_nothing
        self._validates = super()._should_check_val_epoch()
        takes_iterator = isinstance(data_fetcher, _DataLoaderIterDataFetcher)
        self._is_ours = module.automatic_optimization and not takes_iterator
        self._steps_schedules = self._is_ours and all(
            (config.interval, config.frequency, config.reduce_on_plateau) == ("step", 1, False)
            for config in trainer.lr_scheduler_configs
        )
        step = module.training_step
        self._takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        self._own_hooks: dict[str, Any] = {}  # the module's
        self._callbacks: dict[str, list[Any]] = {}
        for name in OF_EACH_BATCH:
            self._own_hooks[name] = overridden_hook(module, name, L.LightningModule)
            self._callbacks[name] = []
            for callback in trainer.callbacks:
                hook = overridden_hook(callback, name, Callback)
                if hook:
                    self._callbacks[name].append(partial(hook, trainer, module))
        self._callbacks[BATCH_END] = self._with_steps(trainer, module)
        self.drops_gradients = not (
            overridden_hook(module, "optimizer_zero_grad", L.LightningModule)
            or self._own_hooks["on_before_zero_grad"]
            or self._callbacks["on_before_zero_grad"]
            or any(type(one).zero_grad is not Optimizer.zero_grad for one in trainer.optimizers)
        )
        self._before_transfer = self._transfer_hook("on_before_batch_transfer")
        self._transfer = self._transfer_hook("transfer_batch_to_device")
        self._after_transfer = self._transfer_hook("on_after_batch_transfer")
        if getattr(self._transfer, "__func__", None) in (
            L.LightningModule.transfer_batch_to_device,
            L.LightningDataModule.transfer_batch_to_device,
        ):
            self._transfer = _to_device

    def _with_steps(self, trainer: Any, module: Any) -> list[Any]:
        """Returns the hooks at the end of a step, and removes from `_between` those that a
        StepCallback has."""
        found: list[Any] = []
        self._between: list[Any] = []  # of a micro-batch that is accumulated
        for callback in trainer.callbacks:
            hook = overridden_hook(callback, BATCH_END, Callback)
            if getattr(hook, "__func__", None) is StepCallback.on_train_batch_end:
                found.append(partial(callback.on_step_end, trainer, module))
            elif hook:
                found.append(partial(hook, trainer, module))
                self._between.append(found[-1])
        return found

    def _transfer_hook(self, name: str) -> Any:
        """Returns the data module's or module's hook; in the latter, `self.log` needs its name."""
        selector: Any = self.trainer._data_connector._datahook_selector
        owner = selector.get_instance(name)
        hook = overridden_hook(owner, name, L.LightningModule)
        if hook and owner is self._module:
            return partial(call, self._module, name, hook)
        return getattr(owner, name)

    def each(self, name: str, *args: Any) -> Any:
        """Calls the hook `name` of the callbacks, then the module's, and returns its result."""
        last, hooks = self._own_hooks[name], self._callbacks[name]
        if name == BATCH_END and self._accumulates:
            hooks = self._between
        if last is None and not hooks:
            return None
        names = vars(self._module)
        before, names["_current_fx_name"] = names["_current_fx_name"], name  # for `self.log`
        for hook in hooks:
            hook(*args)
        answer = last(*args) if last else None
        names["_current_fx_name"] = before
        return answer

    def advance(self, data_fetcher: Any) -> None:
        """Runs a batch. It does not check for SIGTERM: callbacks/preemption.py does."""
        if self.restarting or not self._is_ours:
            super().advance(data_fetcher)
            return
        trainer, progress = self.trainer, self.batch_progress
        self.step_before = self.global_step
        connector = trainer._logger_connector
        self.begin_window()
        if self.val_loop._restarting:
            self.val_loop.restarting = False
        batch, _, _ = next(data_fetcher)
        batch_idx = self.batch_idx + 1
        progress.is_last_batch = data_fetcher.done
        batch = self.batch_to_device(batch)
        progress.increment_ready()
        self._accumulates = super()._should_accumulate()
        connector._first_loop_iter = connector._first_loop_iter is None
        results = self._results
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None

        output, ends = None, False
        if batch is None:
            self._refuse_a_gap()
        else:
            ends = self.each("on_train_batch_start", batch, batch_idx) == -1
            trainer.strategy.on_train_batch_start(batch, batch_idx)
        if ends:
            progress.increment_by(0, is_last_batch=True)
            self._accumulates = super()._should_accumulate()
        elif batch is not None:
            progress.increment_started()
            given: Any = {"batch": batch}
            if self._takes_index:
                given["batch_idx"] = batch_idx
            output = self.automatic_optimization.run(trainer.optimizers[0], batch_idx, given)
        progress.increment_processed()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if ends:
            raise StopIteration
        self.each(BATCH_END, output, batch, batch_idx)
        if results:  # `self.log` was used
            connector.on_batch_end()
        results.batch = results.batch_size = None
        progress.increment_completed()
        if results:
            connector.update_train_step_metrics()

    def _refuse_a_gap(self) -> None:
        """Warns once that a loader yields None, as a `collate_fn` does that skips broken samples.
        Raises RuntimeError on several ranks, where the others wait for this rank's gradients."""
        if self.trainer.world_size > 1:
            raise RuntimeError(f"the train_dataloader yielded None: {NO_GAPS}")
        self._warning_cache.warn("train_dataloader yielded None: this batch is skipped")

    def on_advance_end(self, data_fetcher: Any) -> None:
        trainer = self.trainer
        rare = self._skip_next_val or trainer.should_stop or trainer.received_sigterm
        if rare or self._should_check_val_fx(data_fetcher):
            super().on_advance_end(data_fetcher)
            return
        self.update_lr_schedulers("step", update_plateau_schedulers=True)
        self._batches_that_stepped += not self._should_accumulate()

    def batch_to_device(self, batch: Any) -> Any:
        strategy, default = self.trainer.strategy, precision.Precision.convert_input
        if type(strategy.precision_plugin).convert_input is not default:
            batch = strategy.precision_plugin.convert_input(batch)
        batch = self._transfer(self._before_transfer(batch, 0), strategy.root_device, 0)
        batch = self._after_transfer(batch, 0)
        return getattr(strategy, "shard_batch", lambda unchanged: unchanged)(batch)

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        if not self._steps_schedules:
            super().update_lr_schedulers(interval, update_plateau_schedulers)
        elif interval == "step" and not update_plateau_schedulers and not self._should_accumulate():
            for config in self.trainer.lr_scheduler_configs:
                self.scheduler_progress.increment_ready()
                step = self._module.lr_scheduler_step
                call(self._module, "lr_scheduler_step", step, config.scheduler, None)
                self.scheduler_progress.increment_completed()

    def _should_accumulate(self) -> bool:
        return super()._should_accumulate() if self._accumulates is None else self._accumulates

    def _should_check_val_epoch(self) -> bool:
        return super()._should_check_val_epoch() if self._validates is None else self._validates


class Optimization(OfSteps):
    """Automatic optimization with fewer calls per micro-batch and optimizer step."""

    def run(self, optimizer: Any, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """Lightning creates four closures, two objects and two copies of the loss for this."""
        if self._skip_backward:
            return super().run(optimizer, batch_idx, kwargs)
        trainer, strategy = self.trainer, self.trainer.strategy
        module = trainer.lightning_module
        epoch_loop: Any = trainer.fit_loop.epoch_loop

        def step() -> dict[str, Any]:
            is_first = (batch_idx - epoch_loop.first_batch) % trainer.accumulate_grad_batches == 0
            if is_first and epoch_loop.drops_gradients:
                _drop_gradients(optimizer)  # and the forward pass has their memory
            output = call(module, "training_step", strategy.training_step, *kwargs.values())
            loss, outputs = _loss_and_outputs(output, trainer)
            if is_first and epoch_loop.drops_gradients:
                progress = self.optim_progress.optimizer.zero_grad
                progress.increment_ready()
                progress.increment_started()
                _drop_gradients(optimizer)  # a training step may have called backward itself
                progress.increment_completed()
            elif is_first:
                self._on_before_zero_grad(optimizer)
                self._optimizer_zero_grad(batch_idx, optimizer)
            if loss is not None:
                call(module, "backward", strategy.backward, loss, optimizer)
                self.finish_window(optimizer)
            return outputs

        closure: Any = StepClosure(step)
        if trainer.fit_loop._should_accumulate() and not strategy.handles_gradient_accumulation:
            with _block_parallel_sync_behavior(strategy, block=True):
                closure()
        else:
            self._optimizer_step(batch_idx, closure)
        return closure.consume_result()

    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Any) -> None:
        trainer, steps = self.trainer, self.optim_progress.optimizer.step
        module = trainer.lightning_module
        accumulates = trainer.fit_loop._should_accumulate()  # DeepSpeed's engine is called anyway
        if not accumulates:
            steps.increment_ready()
        optimizer = trainer.strategy._lightning_optimizers[0]
        arguments = (trainer.current_epoch, batch_idx, optimizer, train_step_and_backward_closure)
        call(module, "optimizer_step", module.optimizer_step, *arguments)
        if not accumulates:
            steps.increment_completed()


class StepClosure(Closure):
    """Lightning's closure, of one function in place of three."""

    def __init__(self, step: Callable[[], dict[str, Any]]) -> None:
        super(Closure, self).__init__()
        self._step = step

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        with torch.enable_grad():
            outputs: Any = self._step()
        self._result = outputs
        return outputs.get("loss")


def _loss_and_outputs(output: Any, trainer: Any) -> tuple[Tensor | None, dict[str, Any]]:
    """Returns the loss, divided by the accumulation, and the outputs for callbacks."""
    if output is None and trainer.world_size > 1:
        raise RuntimeError(
            "Skipping the `training_step` by returning None in distributed training is not"
            f" supported: {NO_GAPS}"
        )
    if isinstance(output, Tensor) and trainer.accumulate_grad_batches == 1:
        return output, {"loss": output.detach()}
    result = ClosureResult.from_training_step_output(output, trainer.accumulate_grad_batches)
    if result.loss is None:
        Closure.warning_cache.warn("`training_step` returned `None`: this batch is skipped")
        return None, {}
    return result.closure_loss, result.asdict()


def _drop_gradients(optimizer: Any) -> None:
    """As torch's `zero_grad`, without the range for its profiler, which takes longer."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _to_device(batch: Any, device: Any, dataloader_idx: int) -> Any:
    """As Lightning, which walks through any nesting and asks each leaf whether it can be moved."""
    if type(batch) is not dict or not all(isinstance(value, Tensor) for value in batch.values()):
        return move_data_to_device(batch, device)
    waits = device.type in ("cpu", "mps")  # as there
    move = partial(Tensor.to, device=device, non_blocking=not waits)
    return {name: one if one.device == device else move(one) for name, one in batch.items()}


class Precision(precision.Precision):
    """Lightning's, whose hooks EpochLoop calls: without a context in a context and a profiler's
    range."""

    def train_step_context(self) -> Any:
        return self.forward_context()

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **options: Any
    ) -> Any:
        closure = partial(self._wrap_closure, model, optimizer, closure)
        return step_of(optimizer)(closure=closure, **options)

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        module.trainer.fit_loop.epoch_loop.each("on_before_backward", tensor)
        return tensor

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        module.trainer.fit_loop.epoch_loop.each("on_after_backward")
        return tensor

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        trainer = model.trainer
        trainer.fit_loop.epoch_loop.each("on_before_optimizer_step", optimizer)
        algorithm = trainer.gradient_clip_algorithm
        self._clip_gradients(
            model, optimizer, trainer.gradient_clip_val, gradient_clip_algorithm=algorithm
        )

    def _clip_gradients(
        self, model: Any, optimizer: Any, clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if model.automatic_optimization:
            clip = partial(
                model.configure_gradient_clipping,
                gradient_clip_val=clip_val,
                gradient_clip_algorithm=gradient_clip_algorithm,
            )
            call(model, "configure_gradient_clipping", clip, optimizer)


class MixedPrecision(precision.MixedPrecision, Precision):
    """Lightning's MixedPrecision, whose `super()` is the class above. Checkpoints contain the loss
    scaler's state under this name."""
