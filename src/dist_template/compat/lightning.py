"""Private names of Lightning that the library needs. Verified on lightning 2.6;
tests/compat/test_names.py checks them.

Where a name is gone, its function raises AttributeError or ImportError, unless its docstring names
a fallback. loop.py and epochs.py concern the training loop's speed and position."""

import os
import sys
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from traceback import walk_tb
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies.launchers import subprocess_script as launcher
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.core import optimizer as lightning_optimizer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.connectors.data_connector import _resolve_overfit_batches
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ..errors import Exit, InputError, reason
from .epoch_metrics import reduce_over_ranks

GRACE_S = 5.0  # for the processes to exit with the code of a common decision


def logs_graph(logger: Any) -> bool:
    """Whether a logger, such as TensorBoard's, draws the module's graph (no public name)."""
    return bool(getattr(logger, "_log_graph", False))


def accumulates(trainer: L.Trainer) -> bool:
    """Whether the present micro-batch ends without an optimizer step (no public name)."""
    return trainer.fit_loop._should_accumulate()


def has_passed(trainer: Any, every: int) -> bool:
    """Whether the present batch has taken the run to a multiple of `every` optimizer steps, or past
    it: in manual optimization a batch may take several steps, or none. Each optimizer's steps
    count, as in `trainer.global_step` and `trainer.max_steps`. In Lightning's own loop, which does
    not know the step before: whether the present step is such a multiple."""
    before = getattr(trainer.fit_loop.epoch_loop, "step_before", None)
    if before is None:
        return trainer.global_step % every == 0
    return trainer.global_step // every > before // every


def last_step(trainer: Any, module: L.LightningModule) -> float:
    """Returns the optimizer step at which training ends; inf: it has no end. In manual optimization
    that is estimated from the steps per batch until now: Lightning's `estimated_stepping_batches`
    counts batches."""
    if module.automatic_optimization:
        return trainer.estimated_stepping_batches
    most = trainer.max_steps if trainer.max_steps >= 0 else float("inf")
    epochs = trainer.max_epochs
    if epochs is None or epochs < 0 or trainer.num_training_batches == float("inf"):
        return most
    batches, taken = trainer.num_training_batches * epochs, batch_progress(trainer).total.ready
    steps_per_batch = trainer.global_step / taken if taken else 1
    return min(round(batches * steps_per_batch), most)


def validation_may_follow(trainer: Any) -> bool:
    """Whether a validation may follow this batch: always, if an interval in time decides."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    return trainer._val_check_time_interval is not None or loop._should_check_val_fx(fetcher)


def leave_signals_alone(trainer: L.Trainer) -> None:
    """Keeps the Trainer from handling SIGTERM, by a broadcast and a read from the device before
    every micro-batch: callbacks/preemption.py stops all ranks together instead."""
    vars(trainer._signal_connector)["register_signal_handlers"] = _nothing
    vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = _nothing


def checkpoint_of(trainer: L.Trainer) -> dict[str, Any]:
    """Returns what `Trainer.save_checkpoint` would write, without writing it. Collective."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def timeout_of(strategy: Any) -> timedelta:
    """Returns how long collectives may wait."""
    return getattr(strategy, "_timeout", None) or default_pg_timeout


def limit_threads(num_processes: int) -> None:
    """Divides this machine's CPUs over its ranks, which Lightning does for some strategies."""
    _set_num_threads_if_needed(num_processes)


def torch_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer inside Lightning's wrapper, or `optimizer` itself."""
    return getattr(optimizer, "_optimizer", optimizer)


def wandb_options(logger: Any) -> dict[str, Any]:
    """Returns the arguments of `wandb.init`, which may be changed until the run starts: the mode
    depends on whether W&B is reachable then."""
    return logger._wandb_init


def has_wandb_run(logger: Any) -> bool:
    """Whether the logger's run has started: reading its public `experiment` would start it."""
    return logger._experiment is not None


class LoggerConnector(_LoggerConnector):
    """Logs metrics that name no step of their own at `trainer.global_step`. Lightning (2.6.6) logs
    them at one step less, in another line than other metrics of the same step.

    Metrics of an epoch are of all ranks, also without `sync_dist`: Lightning's are rank 0's. They
    are so already in the hooks at the epoch's end, where a rank that reads
    `trainer.callback_metrics` alone would wait for the others in Lightning."""

    def __init__(self, trainer: Any) -> None:
        """Collective, if the ranks' process group is on GPUs: they exchange metrics on the CPU."""
        super().__init__(trainer)
        self.group: Any = None
        if dist.is_initialized() and trainer.strategy.root_device.type != "cpu":
            self.group = dist.new_group(backend="gloo")

    def reduce_over_ranks(self) -> None:
        if self.trainer.world_size > 1:
            reduce_over_ranks(self.trainer, self.group)

    def epoch_end_reached(self) -> None:
        super().epoch_end_reached()
        if self.trainer.training:  # of an evaluation, loaders end one by one
            self.reduce_over_ranks()

    def _evaluation_epoch_end(self) -> None:
        super()._evaluation_epoch_end()
        self.reduce_over_ranks()
        self._update_from_loaders()

    def on_epoch_end(self) -> None:
        self.reduce_over_ranks()
        super().on_epoch_end()

    def _update_from_loaders(self) -> None:
        """Replaces what Lightning stored when each loader ended by the metrics of all ranks. In the
        sanity check Lightning stores none, so that callbacks know no metric of several loaders."""
        results: Any = self.trainer._results
        outputs = self.trainer._evaluation_loop._logged_outputs
        log: dict[str, Any] = {}
        loaders = {metric.meta.dataloader_idx for metric in results.values()}
        for loader in sorted(loaders, key=lambda index: -1 if index is None else index):
            results.dataloader_idx = loader
            metrics = results.metrics(on_step=False)
            self._progress_bar_metrics.update(metrics["pbar"])
            self._callback_metrics.update(metrics["callback"])
            self._logged_metrics.update(metrics["log"])
            log |= metrics["log"]
        for output in outputs:
            output.update({name: log.pop(name) for name in output if name in log})
        outputs[-1].update(log)  # what other ranks alone have logged
        results.dataloader_idx = None

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        names_step = step is not None or "step" in metrics
        super().log_metrics(metrics, step if names_step else self.trainer.global_step)


def log_at_optimizer_steps(trainer: Any) -> None:
    """Logs values of `self.log` at the optimizer step of their batch; call before the first."""
    if type(trainer._logger_connector) is _LoggerConnector:
        trainer._logger_connector = LoggerConnector(trainer)
        # It advises what the connector does.
        warnings.filterwarnings("ignore", message=".*sync_dist=True.*")


# ---- the training loop ---------------------------------------------------------------------------


def metrics_group(trainer: Any) -> dist.ProcessGroup | None:
    """Returns the ranks' group on the CPU by which they exchange metrics; None: the default one."""
    return getattr(trainer._logger_connector, "group", None)


def batch_progress(trainer: L.Trainer) -> Any:
    """Returns the counters of a rank's training batches, `total` and `current` (no public name)."""
    return trainer.fit_loop.epoch_loop.batch_progress


def in_sequence(loader: Any) -> Any:
    """Returns a loader, or a collection, whose samplers are sequential, with a warning for others:
    what `trainer.overfit_batches` asks for."""
    combined = loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader)
    _resolve_overfit_batches(combined, RunningStage.TRAINING)
    return combined if loader is combined else combined.iterables


def batches_of_epoch(trainer: Any) -> int:
    """Returns the batches that have been trained on in the present epoch. Between two epochs the
    counter is still the former's."""
    epochs = trainer.fit_loop.epoch_progress.current
    is_between = epochs.ready == epochs.processed
    return 0 if is_between else batch_progress(trainer).current.ready


def mode_of(loader: CombinedLoader) -> Any:
    """Returns how a CombinedLoader combines its loaders, such as "max_size_cycle"."""
    return loader._mode


def replace_clipping(module: L.LightningModule, clip: Callable[..., None]) -> None:
    """Lets Lightning call `clip(original, optimizer, ...)` in place of the module's
    `configure_gradient_clipping`, the original: it (2.6) calls no hook between clipping, which
    computes the norm, and the optimizer."""
    original = module.configure_gradient_clipping
    vars(module)["configure_gradient_clipping"] = partial(clip, original)


def save_after_module(trainer: Any, module: L.LightningModule) -> None:
    """Lets callbacks that save run after the module's own hooks of the same name. Lightning (2.6.6)
    calls them before: a checkpoint would lack what the module does at the end of its batch, such as
    an average of its weights, and a resumed training would never do it."""
    for name in ("on_train_batch_end", "on_validation_end"):
        own = getattr(module, name)
        if getattr(own, "__func__", None) is getattr(L.LightningModule, name):
            continue
        hooks = []
        for callback in trainer.callbacks:
            if isinstance(callback, Checkpoint) and name not in vars(callback):
                hook = getattr(callback, name)
                if getattr(hook, "__func__", None) is not getattr(Callback, name):
                    hooks.append(partial(hook, trainer, module))
                    vars(callback)[name] = _nothing
        if hooks:
            vars(module)[name] = partial(_in_turn, [own, *hooks])


def undo_save_after_module(trainer: Any, module: L.LightningModule) -> None:
    for name in ("on_train_batch_end", "on_validation_end"):
        hook = vars(module).get(name)
        if hook and getattr(hook, "func", None) is _in_turn:
            vars(module)[name] = hook.args[0][0]
        for callback in trainer.callbacks:
            if vars(callback).get(name) is _nothing:
                del vars(callback)[name]


def _in_turn(hooks: list[Callable[..., None]], *args: Any) -> None:
    for hook in hooks:
        hook(*args)


# ---- the launcher --------------------------------------------------------------------------------


class RankObserver(launcher._ChildProcessObserver):
    """Lightning's thread, which kills all ranks when one has failed, the first too; here with a
    message and a code."""

    def _terminate_all(self) -> None:
        time.sleep(GRACE_S)  # if this process exits in the meantime, this thread ends with it
        codes = []
        for child in self._child_processes:
            code = child.poll()
            if code:
                codes.append(code)
            child.kill()
        print(
            f"ranks exited with {codes} and rank 0 did not: terminating all",
            file=sys.stderr,
            flush=True,
        )
        os._exit(Exit.of_all(codes))


def exit_with_codes() -> None:
    """Lets Lightning's launcher in this process exit with a code of all ranks when one has
    failed."""
    vars(launcher)["_ChildProcessObserver"] = RankObserver


# ---- strategies ----------------------------------------------------------------------------------


def before_setup_environment(strategy: Strategy, function: Callable[[], None]) -> None:
    """Calls `function` on every rank before the strategy starts its process group; Lightning (2.6)
    has no hook."""
    start = strategy.setup_environment

    def setup_environment() -> None:
        function()
        start()

    vars(strategy)["setup_environment"] = setup_environment


def set_ddp_defaults(strategy: DDPStrategy, **options: Any) -> None:
    """Gives DistributedDataParallel these options where the configuration gives none."""
    strategy._ddp_kwargs = options | strategy._ddp_kwargs


FORMS = """return an optimizer, a list of them, ([optimizers], [schedules]), or \
{"optimizer": …, "lr_scheduler": …}"""


@contextmanager
def explained_optimizers(module: L.LightningModule) -> Generator[None]:
    """Inside, what Lightning says of the result of `configure_optimizers` is raised as an
    InputError; an error in the module's own code stays what it is."""
    try:
        yield
    except (MisconfigurationException, RuntimeError, TypeError) as error:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        if not frames or frames[-1].f_code.co_filename != lightning_optimizer.__file__:
            raise
        why = reason(error)
        end = f"; {FORMS}" if why.startswith("Unknown") else ""
        raise InputError(f"{type(module).__name__}.configure_optimizers: {why}{end}") from error


def before_setup(strategy: Strategy, function: Callable[[], None]) -> None:
    """Calls `function` when `setup` and `configure_model` of the module have run, before the
    strategy wraps or shards the module, which has no hook in Lightning (2.6)."""
    set_up = strategy.setup

    def setup(trainer: L.Trainer) -> None:
        function()
        set_up(trainer)

    vars(strategy)["setup"] = setup


def explain_optimizers(strategy: Strategy, module: L.LightningModule) -> None:
    """Lets `strategy` create optimizers inside of `explained_optimizers`."""
    create = strategy.setup_optimizers

    def setup_optimizers(trainer: L.Trainer) -> None:
        with explained_optimizers(module):
            create(trainer)

    vars(strategy)["setup_optimizers"] = setup_optimizers


def wrap_again(strategy: DDPStrategy) -> None:
    """Wraps the module in a new DistributedDataParallel, which reduces the gradients of the
    parameters that are trainable now; the old one knows those of its start alone. Each rank keeps
    its own buffers. Collective."""
    given = strategy._ddp_kwargs
    strategy._ddp_kwargs = given | {"init_sync": False}
    try:
        strategy.model = strategy.lightning_module
        strategy.configure_ddp()
    finally:
        strategy._ddp_kwargs = given


def before_training_step(strategy: Strategy, function: Callable[[], None]) -> None:
    """Calls `function` before each `training_step`, after the hooks `on_train_batch_start` of all
    callbacks and the module."""
    begin = strategy.on_train_batch_start

    def on_train_batch_start(batch: Any, batch_idx: int) -> None:
        function()
        begin(batch, batch_idx)

    vars(strategy)["on_train_batch_start"] = on_train_batch_start


def after_training(strategy: Strategy) -> None:
    """Undoes `before_training_step`."""
    vars(strategy).pop("on_train_batch_start", None)


def start_process_group(strategy: ModelParallelStrategy, gpu_backend: str | None) -> None:
    """Starts the ranks' process group without the mesh of two dimensions that ModelParallelStrategy
    creates next; set `mesh` afterwards. `gpu_backend` is used on GPUs if the configuration names
    none; None: Lightning's choice."""
    super(ModelParallelStrategy, strategy).setup_environment()
    if strategy.root_device.type == "cuda":
        strategy._process_group_backend = strategy._process_group_backend or gpu_backend
    strategy._setup_distributed()


def set_configure_model(module: L.LightningModule, configure: Callable[[], None] | None) -> None:
    """Sets the hook of a module in place of its class's, or removes it. Lightning (2.6) calls it
    only if `is_overridden`, which follows `__wrapped__`: `wrap_method` would hide it."""
    vars(module).pop("configure_model", None)
    if configure is not None:
        module.configure_model = configure


def set_mesh(strategy: ModelParallelStrategy, mesh: Any) -> None:
    """Sets the strategy's `device_mesh`, which has no public setter."""
    strategy._device_mesh = mesh


def _nothing(*_: Any, **__: Any) -> None:
    pass
