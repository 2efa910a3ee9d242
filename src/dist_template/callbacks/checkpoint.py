"""Checkpoint callbacks: decide when checkpoints are written and which of them are kept."""

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from .. import processes
from ..checkpoint import commit, manifest
from ..checkpoint.formats import use_every_format
from ..checkpoint.identity import KEY, compare, fixed_settings, settings_of
from ..checkpoint.optimizer import ANEW, ParameterNames
from ..compat.epochs import ends_epoch
from ..compat.lightning import (
    accumulates,
    has_passed,
    metrics_group,
    save_after_module,
    undo_save_after_module,
)
from ..compat.steps import StepCallback
from ..errors import Ended, Exit, InputError, check_least
from ..model.any_module import validation_loss
from ..project import has_command_line, in_run
from ..ranges import Folder, NonNegativeInt, PositiveInt
from ..records import GIB
from ..run_callback import loggers_of
from .epoch_metrics import EpochMetrics


@dataclass(eq=False)
class LastCheckpoint(StepCallback, Checkpoint):
    """Writes `step<N>.ckpt` every `every_n_steps` and at the end; a run resumes from the newest.

    An older checkpoint is deleted after a newer one is committed, so the disk must hold one more
    than is kept. If the disk is full or fails, training continues with a warning and saves again
    when the next one is due; at the last step it stops with exit code 1.

    Args:
        every_n_steps: Optimizer steps between two checkpoints.
        keep: How many of the newest to keep, at least 1. With 2, a damaged one costs only its
            steps.
        asynchronous: Write in the background: training waits only until this rank's shard of the
            checkpoint is copied to host memory, which must have room for it. A failure is reported
            when the next one is due. Not with state on NVMe. false: training waits until all is
            written.
        dirpath: The folder, on a file system that all nodes share; with `run.store`, it may be on
            each node's own.
        accept_changes: Keys, such as [data.seq_len], that may differ from the checkpoint's although
            the samples, the model's function or its loss depend on them."""

    every_n_steps: PositiveInt = 100
    keep: PositiveInt = 2
    asynchronous: bool = False
    dirpath: Folder = "{run}/checkpoints"
    accept_changes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_least("last_checkpoint", every_n_steps=(self.every_n_steps, 1), keep=(self.keep, 1))
        self.folder = Path(self.dirpath)
        self.fixed_settings: dict[str, object] = {}  # for the manifest
        self.saved_step = 0  # there is nothing to save before the first step
        self._saver: commit.BackgroundSaver | None = None
        self._pending: Path | None = None  # what it saves

    def newest(self) -> Path | None:
        """Returns the newest valid checkpoint in the folder, for `ckpt_path` of any Trainer."""
        return manifest.newest(self.folder)

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        self.folder = in_run(self.folder, trainer)
        use_every_format(trainer.strategy)
        callbacks: list[Callback] = trainer.callbacks
        for kind in (ParameterNames, EpochMetrics):  # a Trainer of one's own may lack them
            if not any(isinstance(callback, kind) for callback in callbacks):
                callbacks = [kind(), *callbacks]
        callbacks = [each for each in callbacks if getattr(each, "last", None) is not self]
        trainer.callbacks = [_BeforeOthers(self), *callbacks]
        if stage == "fit" and not self.fixed_settings:
            self.fixed_settings = fixed_settings(trainer, trainer.datamodule, pl_module)

    def compare(self, path: Path, trainer: L.Trainer, data: Any, module: L.LightningModule) -> None:
        """Compares what the checkpoint `path` was trained on with what it would be now. Raises
        InputError if it would not be the same training, and that is not accepted."""
        self.fixed_settings = now = fixed_settings(trainer, data, module)
        changed = compare(path, settings_of(path), now, self.accept_changes)
        setattr(module, ANEW, "optimizer" in changed)
        if hasattr(data, "changed_settings"):
            data.changed_settings = changed

    def manifest_entries(self) -> dict[str, Any]:
        return {KEY: self.fixed_settings}

    def on_load_checkpoint(
        self, trainer: Any, pl_module: L.LightningModule, checkpoint: Mapping[str, object]
    ) -> None:
        if trainer.ckpt_path and not has_command_line():  # which has compared before the start
            self.compare(Path(trainer.ckpt_path), trainer, trainer.datamodule, pl_module)

    def save_now(self, trainer: L.Trainer) -> bool:
        """Saves this step unless it is saved already, and returns whether it is. Collective."""
        self._settle(trainer)
        if trainer.global_step != self.saved_step:
            self._save(trainer)
        return trainer.global_step == self.saved_step

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        save_after_module(trainer, pl_module)
        step = trainer.global_step
        if processes.broadcast(manifest.torn(self.folder / manifest.name(step)) is None):
            self.saved_step = step  # training resumes from it
        if trainer.local_rank == 0:  # the folder may be on each node's own disk
            commit.clear(self.folder)
        if self.asynchronous:
            self._saver = commit.BackgroundSaver(trainer.strategy)

    def on_step_end(self, trainer: Any, pl_module: L.LightningModule, *_: object) -> None:
        # A checkpoint has no accumulated gradients, so it is written after a full step.
        if not ends_epoch(trainer):
            self._save_if_due(trainer)

    def after_epoch(self, trainer: Any) -> None:
        """Saves an epoch's last step, so that no resumed run repeats the epoch's end, whose hooks
        may need what the module has collected in the epoch."""
        if not accumulates(trainer):
            self._save_if_due(trainer)

    def _save_if_due(self, trainer: Any) -> None:
        if trainer.fast_dev_run:
            return
        if not has_passed(trainer, self.every_n_steps):
            return
        step = trainer.global_step
        if self._saver is None:
            self.save_now(trainer)
        elif step != self.saved_step and self._pending != self.folder / manifest.name(step):
            self._settle(trainer)
            self._pending = self.folder / manifest.name(step)
            _flush_loggers(trainer)
            self._saver.start(trainer, self._pending)

    def on_train_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._settle(trainer)
        if trainer.global_step != self.saved_step and not trainer.fast_dev_run:
            self._save(trainer, is_last=True)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if self._saver is not None:
            self._saver.abandon()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            undo_save_after_module(trainer, pl_module)
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def _save(self, trainer: L.Trainer, is_last: bool = False) -> None:
        path = self.folder / manifest.name(trainer.global_step)
        _flush_loggers(trainer)
        self._conclude(trainer, path, partial(commit.save, trainer, path), is_last)

    def _settle(self, trainer: L.Trainer) -> None:
        """Waits for the save in the background, if there is one; on all ranks at the same step."""
        if self._saver is not None and self._pending is not None:
            path, self._pending = self._pending, None
            self._conclude(trainer, path, self._saver.wait)

    def _conclude(
        self, trainer: L.Trainer, path: Path, save: Callable[[], None], is_last: bool = False
    ) -> None:
        """Calls `save` for `path` and deletes older checkpoints, or reports why it failed."""
        try:
            save()
        except commit.SaveError as error:
            sentence = _failure(path, error)
            if is_last:  # there is no later save that would try again
                raise Ended(Exit.FAILED, f"{sentence}; training stops") from error
            rank_zero_warn(f"{sentence}; training continues")
            return
        self.saved_step = manifest.step_of(path)
        for logger in loggers_of(trainer):
            logger.on_checkpoint(path)
        if commit.leads(path.parent):
            for old in outdated(path, self.keep):
                commit.remove(old)


class _BeforeOthers(Callback):
    """Writes the last checkpoint before other callbacks' `on_train_end`, which may replace the
    weights: Lightning's WeightAveraging does. A resumed run continues with training's weights."""

    def __init__(self, last: LastCheckpoint) -> None:
        self.last = last

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.last.on_train_end(trainer, pl_module)


def outdated(saved: Path, keep: int) -> list[Path]:
    """Returns the checkpoints to delete after `saved` was committed.

    Checkpoints of later steps were written before training went back to an earlier step; a restart
    must not load them.
    """
    steps = [path for path in manifest.found(saved.parent) if path.name.startswith("step")]
    now = manifest.step_of(saved)  # below, the newest is first
    valid = [path for path in steps if manifest.step_of(path) <= now and not manifest.torn(path)]
    kept = {saved, *valid[:keep]}
    return [path for path in steps if path not in kept]


def _flush_loggers(trainer: L.Trainer) -> None:
    """Flushes the loggers: a run that resumes after this step must have its metrics up to it."""
    for logger in trainer.loggers:
        logger.save()


def _failure(path: Path, error: commit.SaveError) -> str:
    """Returns what failed, the free space and the newest valid checkpoint, equal on all ranks."""
    sentence = ""
    if processes.is_rank_zero():
        folder = next(folder for folder in path.absolute().parents if folder.exists())
        free_gib = shutil.disk_usage(folder).free / GIB
        newest = manifest.newest(path.parent)
        valid = f"the newest valid checkpoint is {newest}" if newest else "no checkpoint is valid"
        sentence = (
            f"{path.name} was not saved, {error} ({free_gib:.1f} GiB are free at {folder}); {valid}"
        )
    return processes.broadcast(sentence)


class Decision(NamedTuple):
    """What to do after a validation: the metric that decides, its value, whether a checkpoint is
    wanted, and the sentence for a metric that was not measured."""

    monitor: str | None = None
    score: float = 0.0
    is_wanted: bool = False
    lacks: str = ""


@dataclass(eq=False)
class BestCheckpoint(Checkpoint):
    """Keeps `best-step<N>.ckpt`, the checkpoints with the best validation results.

    Args:
        monitor: The validation metric that decides. null: eval/loss, or what a module calls
            its validation loss (val_loss, valid/loss, …); without one, none is kept.
        mode: Whether the lowest ("min") or the highest ("max") is best.
        keep: How many to keep. 0 turns it off.
        dirpath: The folder."""

    monitor: str | None = None
    mode: Literal["min", "max"] = "min"
    keep: NonNegativeInt = 1
    dirpath: Folder = "{run}/checkpoints"

    def __post_init__(self) -> None:
        self.folder = Path(self.dirpath)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.folder = in_run(self.folder, trainer)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.monitor is not None and self.keep and not trainer.enable_validation:
            raise InputError(
                f"best_checkpoint.monitor is {self.monitor!r} and has no effect, because nothing is"
                " validated: define validation_step and val_dataloader, set"
                " trainer.limit_val_batches, or remove the key"
            )

    def on_validation_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or not self.keep or trainer.fast_dev_run:
            return
        # Rank 0 decides: others lack a metric that was logged with `rank_zero_only`.
        decision = self._decision(trainer, trainer.callback_metrics)
        decision = processes.broadcast(decision, metrics_group(trainer))
        self.monitor = decision.monitor
        if decision.lacks:
            raise InputError(decision.lacks)
        if not decision.is_wanted:
            return
        path, score = self._path(trainer), decision.score
        try:
            commit.save(trainer, path, score=score)
        except commit.SaveError as error:
            rank_zero_warn(f"{_failure(path, error)}; training continues")
            return
        for logger in loggers_of(trainer):
            logger.on_checkpoint(path)
        if commit.leads(self.folder):
            for worse in manifest.ranked(self.folder, self.mode)[self.keep :]:
                commit.remove(worse)

    def _decision(self, trainer: Any, metrics: Mapping[str, Any]) -> "Decision":
        """Returns what this rank would do after a validation; it asks no other rank."""
        if not processes.is_rank_zero():
            return Decision()
        monitor = self.monitor
        if not monitor:
            monitor = validation_loss(metrics)
        if not monitor:  # the module logs no validation loss
            return Decision()
        if monitor not in metrics:
            measured = ", ".join(sorted(metrics))
            lacks = f"best_checkpoint.monitor {monitor!r} was never logged; logged: {measured}"
            return Decision(monitor, lacks=lacks)
        if trainer.sanity_checking:
            return Decision(monitor)
        score = float(metrics[monitor])
        is_new = manifest.torn(self._path(trainer)) is not None
        return Decision(monitor, score, self._is_among_the_best(score) and is_new)

    def _path(self, trainer: Any) -> Path:
        return self.folder / manifest.name(trainer.global_step, best=True)

    def _is_among_the_best(self, score: float) -> bool:
        """Compares with the checkpoints in the folder, also after a restart; NaN never is."""
        if math.isnan(score):
            return False
        kept = manifest.ranked(self.folder, self.mode)[: self.keep]
        if len(kept) < self.keep:
            return True
        worst = manifest.read(kept[-1])["score"]
        if self.mode == "min":
            return score < worst
        return score > worst
