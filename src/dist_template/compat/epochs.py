"""Resuming at any step: a resumed training continues right after the batch at which its checkpoint
was written.

Lightning derives from its counters where a checkpoint was written, and errs (read and tried in
lightning 2.6.6, fit_loop.py and training_epoch_loop.py):

- A stop by `max_steps` inside an epoch counts as a finished epoch.
- A resume from an epoch's last batch skips the end of that epoch and starts the next one without
  counting it, so that a second resume trains it twice.
- With `max_steps`, a resume from a finished epoch takes a step with one micro-batch.
- A resumed epoch does not call `on_train_epoch_start`, so that a module has not what it sets there.
- At a resumed epoch's end a plateau is not stepped, because Lightning does not save its metric;
  callbacks/epoch_metrics.py does.
- A checkpoint of an epoch's last batch is written before the epoch's end, so that a resume calls
  `on_train_epoch_end` in a process that trained none of the epoch's batches. Callbacks with
  `after_epoch` save after it.
- `reload_dataloaders_every_n_epochs` counts from the resumed epoch.
- Loaders that were set up before the checkpoint was loaded (a schedule in `configure_optimizers`
  asks for the number of steps) have read a batch of the first epoch, and get no saved state.

Apart from a resume: where an epoch's last optimizer step has j batches of the k that
`accumulate_grad_batches` says, Lightning's gradient is j/k of their mean
(https://github.com/Lightning-AI/pytorch-lightning/issues/19987). Here it is their mean.

Here, an epoch that was stopped early is saved as unfinished, the checkpoint records which part of
the loop has run (`Point`), and a resume continues with the next part: a due validation, the end of
the epoch, or the next batch."""

import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from torch import Tensor

KEY = "resume_point"  # in the epoch loop's state
FETCHING = "[_TrainingEpochLoop].train_dataloader_next"  # in a profile, as by Lightning's loop
# Hooks at an epoch's start that change what a checkpoint has, or log; a subclass may have others.
SAVED = {
    kind.on_train_epoch_start
    for kind in (BaseFinetuning, LearningRateMonitor, StochasticWeightAveraging)
}


class Point(StrEnum):
    """Where in the training loop a checkpoint was written."""

    AFTER_BATCH = "after_batch"  # validation, where it is due, has not begun, or has not finished
    AFTER_VALIDATION = "after_validation"
    AFTER_TRAINING = "after_training"  # or after an epoch: the newest batch is finished


EMPTY_EPOCH = (
    "This process resumed after the last batch of the epoch, so that what the module collected by"
    " itself during the epoch is gone. Give it to `self.log(…, on_epoch=True)`, a torchmetrics"
    " metric or `on_save_checkpoint`, which are saved; or resume from an older checkpoint by"
    " --ckpt_path."
)


@runtime_checkable
class AfterEpoch(Protocol):
    """A callback with a hook after an epoch's last: after `on_train_epoch_end` of the module, the
    validation and the schedules."""

    def after_epoch(self, trainer: Any) -> None: ...


def ends_epoch(trainer: Any) -> bool:
    """Whether the present batch is its epoch's last, so that `after_epoch` follows."""
    loop = trainer.fit_loop
    return isinstance(loop, FitLoop) and loop.epoch_loop._num_ready_batches_reached()


class FitLoop(_FitLoop):
    """Counts an epoch as finished when all its batches were trained on."""

    def state_dict(self, destination: dict | None = None, prefix: str = "") -> dict:
        state = super().state_dict(destination, prefix)
        current: Any = self.epoch_progress.current
        is_between = 0 < current.ready == current.processed
        if is_between and not self.epoch_loop._num_ready_batches_reached():
            for counter in state[prefix + "epoch_progress"].values():
                counter["processed"] -= 1
                counter["completed"] = min(counter["completed"], counter["processed"])
        return state

    def setup_data(self) -> None:
        """Reloads in the epochs of an uninterrupted run: Lightning counts from the resumed one."""
        super().setup_data()
        trainer: Any = self.trainer
        every, epoch = trainer.reload_dataloaders_every_n_epochs, trainer.current_epoch
        if every and self._last_train_dl_reload_epoch == epoch:
            self._last_train_dl_reload_epoch = epoch - epoch % every

    def on_advance_start(self) -> None:
        resumes = self.restarted_mid_epoch or self.restarted_on_epoch_end
        super().on_advance_start()
        if resumes:
            trainer: Any = self.trainer
            for callback in trainer.callbacks:
                hook: Any = callback.on_train_epoch_start
                if getattr(hook, "__func__", hook) not in SAVED:
                    hook(self.trainer, self.trainer.lightning_module)
            call._call_lightning_module_hook(self.trainer, "on_train_epoch_start")

    def on_advance_end(self) -> None:
        """As Lightning's, with the metrics of all ranks for callbacks that monitor one, and with
        `after_epoch` of callbacks when all of the epoch is done."""
        trainer: Any = self.trainer
        loop: Any = self.epoch_loop
        loop.end_window()
        logger = trainer._logger_connector
        logger.epoch_end_reached()
        self.epoch_progress.increment_processed()
        call._call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=False)
        try:
            call._call_lightning_module_hook(trainer, "on_train_epoch_end")
        except Exception as error:
            if not self._trained_in_epoch():
                error.add_note(EMPTY_EPOCH)
            raise
        reduce = getattr(logger, "reduce_over_ranks", None)
        if reduce:
            reduce()
        call._call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=True)
        # Hooks may ask whether the epoch was resumed; the rest is the same for one that was, as its
        # metrics are complete.
        self._restarting = False
        logger.on_epoch_end()
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        loop._batches_that_stepped -= 1  # loggers expect the step of the last batch
        logger.update_train_epoch_metrics()
        loop._batches_that_stepped += 1
        self.epoch_progress.increment_completed()
        if loop._num_ready_batches_reached():
            for callback in trainer.callbacks:
                if isinstance(callback, AfterEpoch):
                    callback.after_epoch(trainer)

    def _trained_in_epoch(self) -> bool:
        """Whether this process has trained on a batch of the present epoch."""
        loop: Any = self.epoch_loop
        return loop.batch_progress.current.ready > getattr(loop, "resumed_at", 0)

    def load_state_dict(self, state_dict: dict, prefix: str = "") -> None:
        super().load_state_dict(state_dict, prefix)
        fetcher: Any = self._data_fetcher
        if fetcher is not None and (self._combined_loader_states_to_load or fetcher.length is None):
            self._combined_loader = None  # set up again
        epoch: Any = self.epoch_progress
        if epoch.current.ready == epoch.current.processed:  # the next batch is of another epoch
            for counter in (epoch.total, epoch.current):
                counter.completed = counter.processed
            loop: Any = self.epoch_loop
            steps = loop.automatic_optimization.optim_progress
            for progress in (loop.batch_progress, loop.scheduler_progress, steps):
                progress.reset_on_run()
            loop.val_loop.batch_progress.reset()  # its totals are an epoch's
            loop._resume_point = Point.AFTER_TRAINING  # also in a checkpoint of Lightning's loops


class ResumableEpochLoop(_TrainingEpochLoop):
    """Resumes right after the checkpoint's batch."""

    _resume_point = Point.AFTER_BATCH  # of the checkpoint that was loaded
    step_before = 0  # optimizer steps when the present batch began
    resumed_at = 0  # batches of the present epoch that earlier processes have trained on
    first_batch = (
        0  # of the present optimizer step in its epoch, or one that precedes it by full steps
    )

    _accumulation = 0  # batches of a step, while a shorter one at an epoch's end is accumulated
    # Takes the monitor of a plateau that is not logged, and the metrics; None: Lightning raises.
    refuse_plateau: Callable[[str, Any], None] | None = None

    def __init__(self, trainer: Any, *steps: Any) -> None:
        super().__init__(trainer, *steps)
        self.automatic_optimization = Optimization(trainer)

    def begin_window(self) -> None:
        """Lets an optimizer step that an epoch's end cuts short accumulate the batches it has."""
        ready, size = self.batch_progress.current.ready, self.trainer.accumulate_grad_batches
        left: Any = self.trainer.num_training_batches - ready  # inf of a stream
        if 0 < left < size and (ready - self.first_batch) % size == 0:
            self._accumulation, self.first_batch = size, ready
            self.trainer.accumulate_grad_batches = left

    def end_window(self) -> None:
        if self._accumulation:
            self.trainer.accumulate_grad_batches, self.first_batch = self._accumulation, 0
            self._accumulation = 0

    def on_save_checkpoint(self) -> dict:
        batches: Any = self.batch_progress.current
        is_finished = batches.completed >= batches.processed
        point = Point.AFTER_TRAINING if is_finished else Point.AFTER_BATCH
        if self.trainer.validating:
            validation = self.val_loop.batch_progress
            is_complete = validation.current.completed == validation.current.ready
            is_over = validation.is_last_batch and is_complete
            point = Point.AFTER_VALIDATION if is_over else Point.AFTER_BATCH
        return super().on_save_checkpoint() | {KEY: str(point)}

    def on_load_checkpoint(self, state_dict: dict) -> None:
        super().on_load_checkpoint(state_dict)
        self._resume_point = Point(state_dict.get(KEY, Point.AFTER_BATCH))

    def update_restart_stage(self) -> None:
        """Keeps Lightning from its own corrections, which it makes where `completed` is behind. A
        validation that was interrupted starts again, so its batches are counted again."""
        batches: Any = self.batch_progress
        validates = batches.current.completed == batches.current.processed
        if self.restarting and validates and self._resume_point is Point.AFTER_BATCH:
            progress = self.val_loop.batch_progress
            progress.total.increment_by(-progress.current.completed)
            progress.reset_on_run()
        for counter in (batches.total, batches.current):
            counter.completed = counter.processed
        super().update_restart_stage()

    def reset(self) -> None:
        super().reset()
        self.resumed_at = self.batch_progress.current.ready

    def advance(self, data_fetcher: Any) -> None:
        if not self.restarting or self._resume_point is Point.AFTER_TRAINING:
            self._restarting = False
            self.step_before = self.global_step
            self.begin_window()
            super().advance(data_fetcher)
            return
        self.val_loop.restarting = False  # it starts with its first batch
        self._skip_next_val = self._resume_point is Point.AFTER_VALIDATION

    def _get_monitor_value(self, key: str) -> Any:
        """Returns a plateau's metric, the mean over all ranks: a batch's metric is each rank's own
        unless it was logged with `sync_dist`, and ranks would train at different rates."""
        value = super()._get_monitor_value(key)
        if value is None and self.refuse_plateau is not None:
            configs = self.trainer.lr_scheduler_configs
            if any(each.monitor == key and each.strict for each in configs):
                self.refuse_plateau(key, self.trainer.callback_metrics)
        if isinstance(value, Tensor) and self.trainer.world_size > 1:
            value = self.trainer.strategy.reduce(value.clone(), reduce_op="mean")
        return value

    def _on_before_fetch(self) -> None:
        trainer: Any = self.trainer
        trainer.profiler.start(FETCHING)

    def _on_after_fetch(self) -> None:
        trainer: Any = self.trainer
        trainer.profiler.stop(FETCHING)

    def _accumulated_batches_reached(self) -> bool:
        ready: int = self.batch_progress.current.ready
        return (ready - self.first_batch) % self.trainer.accumulate_grad_batches == 0

    def _num_ready_batches_reached(self) -> bool:
        """Also where the epoch has fewer batches than when the checkpoint was written."""
        batches = self.batch_progress
        return batches.is_last_batch or batches.current.ready >= self.trainer.num_training_batches


class Optimization(_AutomaticOptimization):
    """Clears gradients at the first batch of a step, where steps differ in their batches too."""

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Any) -> Callable[[], None] | None:
        loop: Any = self.trainer.fit_loop.epoch_loop
        return super()._make_zero_grad_fn(batch_idx - loop.first_batch, optimizer)

    def _make_backward_fn(self, optimizer: Any) -> Callable[[Any], None] | None:
        """Divides gradients by the batches of a step which an end of data that was not known before
        has cut short."""
        backward = super()._make_backward_fn(optimizer)
        if backward is None:
            return None

        def scaled(loss: Any) -> None:
            backward(loss)
            self.finish_window(optimizer)

        return scaled

    def finish_window(self, optimizer: Any) -> None:
        loop: Any = self.trainer.fit_loop.epoch_loop
        size = self.trainer.accumulate_grad_batches
        num_batches = (loop.batch_progress.current.ready - loop.first_batch) % size
        if num_batches and loop.batch_progress.is_last_batch:
            scale_gradients(optimizer, size / num_batches)


def scale_gradients(optimizer: Any, factor: float) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def begin_step(trainer: Any, num_batches: int) -> None:
    """Lets the optimizer step that the next batch begins accumulate the gradients of so many
    batches; 0: of as yet unknown ones. Validation is due at every `trainer.val_check_interval`-th
    step, where that is an integer."""
    loop = trainer.fit_loop.epoch_loop
    loop.first_batch, batches = loop.batch_progress.current.ready, loop.batch_progress.total.ready
    trainer.accumulate_grad_batches = num_batches or 1
    every = getattr(trainer, "val_check_interval", None)
    if isinstance(every, int):
        is_due = (trainer.global_step + bool(num_batches)) % every == 0
        trainer.val_check_batch = batches + num_batches if is_due else sys.maxsize


def make_resumable(trainer: Any, epoch_loop: type[ResumableEpochLoop] = ResumableEpochLoop) -> None:
    """Gives `trainer` the loops of this file, before its first step, unless it has them."""
    given = trainer.fit_loop
    if isinstance(given, FitLoop):
        return
    trainer.fit_loop = FitLoop(trainer, given.min_epochs, given.max_epochs)
    trainer.fit_loop.epoch_loop = epoch_loop(trainer, given.min_steps, given.max_steps)
    new = trainer.fit_loop  # its data source is set if `fit` has started
    new._data_source = given._data_source
    new.epoch_loop.val_loop._data_source = given.epoch_loop.val_loop._data_source
