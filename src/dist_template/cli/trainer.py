"""Completes Lightning's Trainer with the parts that every run has.

1  The strategy: DDP's defaults, threads of each process, the checkpoint format, parameters in half
   precision.
2  The log of the run, beside the user's loggers.
3  Callbacks, in the order of their calls: those that must see everything first; the user's and
   those of every run, which Lightning has already; what writes and prints the results last.
4  The training loop with less overhead.
5  The watchdog, and the comparison of the ranks' environments, which wait for the start."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import RichModelSummary, RichProgressBar
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only

from ..callbacks.checkpoint import BestCheckpoint, LastCheckpoint
from ..callbacks.crash import Crash
from ..callbacks.monitors import Monitors
from ..callbacks.rank_states import RankStates
from ..callbacks.record import Record
from ..callbacks.sample_order import SampleOrder
from ..callbacks.summary import Summary
from ..callbacks.trainable import Trainable
from ..callbacks.watchdog import Watchdog
from ..checkpoint.formats import use_every_format
from ..cluster.fingerprint import SameEnvironment
from ..cluster.redaction import redacted
from ..compat.lightning import limit_threads, set_ddp_defaults
from ..compat.loop import lighten
from ..model import any_module
from ..observe.loggers.run_log import RunLog
from ..parallel.half import HalfParameters
from ..run_callback import unheard
from ..terminal import allow_styles

STYLED = (RichProgressBar, RichModelSummary)  # write colours and moves of the cursor


def complete(
    trainer: Any,
    data: Any,
    run: Path,
    *,
    given: dict[str, Any],
    config: dict[str, Any],
    defaults: Callable[[], str],
    is_manual: bool,
    plateau: str,
) -> Summary:
    """Adds loggers, callbacks, checkpoint formats and the training loop; returns the summary.
    `given` are the Trainer's keyword arguments in the configuration, `config` is the content of
    config.yaml, and `defaults` returns its content with all keys at their defaults. `is_manual`:
    the module steps its optimizers itself. `plateau`: where the monitor of ReduceLROnPlateau is
    set."""
    if isinstance(given.get("strategy"), str) and type(trainer.strategy) is DDPStrategy:
        # Gradients are views of the buckets that are sent; buffers change equally on all ranks, and
        # are not broadcast.
        set_ddp_defaults(trainer.strategy, gradient_as_bucket_view=True, forward_sync_buffers=False)
        if is_manual:  # one backward pass of several may reach the parameters of one optimizer
            set_ddp_defaults(trainer.strategy, find_unused_parameters=True)
    if trainer.num_devices > 1:
        limit_threads(trainer.num_devices)  # Lightning does so in rank 0, for some strategies
    use_every_format(trainer.strategy)
    precision = trainer.strategy.precision_plugin
    if type(precision) is HalfPrecision:
        trainer.strategy.precision_plugin = HalfParameters(precision.precision)
    if not trainer.fast_dev_run:
        trainer.loggers = [*trainer.loggers, RunLog(run)]
    plain = redacted(json.loads(json.dumps(config, default=str)))
    summary = Summary(run, calls_hooks=not trainer.fast_dev_run)
    callbacks = as_list(given.get("callbacks"))
    first: list[Any] = [Crash(run), Trainable(), RankStates(), Monitors(callbacks, plateau)]
    if not any_module.owns_order(data):
        first.insert(0, SampleOrder(distributes=given.get("use_distributed_sampler", True)))
    last = [Record(run, plain, defaults), summary]
    trainer.callbacks = [*first, *trainer.callbacks, *last]
    if given.get("enable_checkpointing") is False:
        savers = (LastCheckpoint, BestCheckpoint)
        trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, savers)]
    if any(isinstance(callback, STYLED) for callback in trainer.callbacks):
        allow_styles()
    lighten(trainer)
    for line in unheard(trainer):
        rank_zero_only(print)(line)
    (watchdog,) = (each for each in trainer.callbacks if isinstance(each, Watchdog))
    (same,) = (each for each in trainer.callbacks if isinstance(each, SameEnvironment))
    watchdog.begin(trainer, run)
    same.begin(trainer, run, plain, watchdog.start_timeout_s)
    return summary


def as_list(given: Any) -> list[Any]:
    """Returns trainer.callbacks as a list: Lightning takes one callback, several or none."""
    if not given:
        return []
    return given if isinstance(given, list) else [given]
