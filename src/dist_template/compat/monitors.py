"""Metrics that Lightning's callbacks and plateaus monitor, and that nothing has logged.

Lightning (2.6) raises a RuntimeError or a MisconfigurationException where it first needs the
metric; both name no key. Here `refuse` raises in their place. Verified on lightning 2.6.6;
tests/compat/test_names.py checks the names. Where one is gone: AttributeError."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from .epochs import ResumableEpochLoop

# Takes what monitors (a callback; None: a plateau), the monitor, and the metrics that are logged.
Refuse = Callable[[Callback | None, str, Iterable[str]], None]


def watch_monitors(trainer: Any, refuse: Refuse) -> None:
    """Lets callbacks and plateaus of `trainer` call `refuse` where Lightning would raise, because
    their monitor is not logged. With `strict=False` Lightning continues, and does so here."""
    for callback in trainer.callbacks:
        own = vars(callback)
        if isinstance(callback, EarlyStopping) and callback.strict:
            check = callback._validate_condition_metric
            own["_validate_condition_metric"] = partial(_stopping, refuse, callback, check)
        elif isinstance(callback, ModelCheckpoint):
            save = callback._save_topk_checkpoint
            own["_save_topk_checkpoint"] = partial(_saving, refuse, callback, save)
    loop = trainer.fit_loop.epoch_loop
    if isinstance(loop, ResumableEpochLoop):
        loop.refuse_plateau = partial(refuse, None)


def leave_monitors(trainer: Any) -> None:
    """Undoes `watch_monitors`."""
    for callback in trainer.callbacks:
        for name in ("_validate_condition_metric", "_save_topk_checkpoint"):
            if isinstance(vars(callback).get(name), partial):
                del vars(callback)[name]
    vars(trainer.fit_loop.epoch_loop).pop("refuse_plateau", None)


def _stopping(refuse: Refuse, callback: Any, check: Callable[[Any], bool], logs: Any) -> bool:
    if callback.monitor not in logs:
        refuse(callback, callback.monitor, logs)
    return check(logs)


def _saving(
    refuse: Refuse, callback: Any, save: Callable[[Any, Any], None], trainer: Any, metrics: Any
) -> None:
    """Before the first validation Lightning only warns, as the metric may be one of its."""
    monitor, validation = callback.monitor, trainer.fit_loop.epoch_loop.val_loop
    is_needed = monitor is not None and callback.save_top_k != 0
    if is_needed and monitor not in metrics and validation._has_run:
        refuse(callback, monitor, metrics)
    save(trainer, metrics)
