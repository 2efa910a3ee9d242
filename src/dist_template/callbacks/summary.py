"""Prints the end of a run: validation, goodput, run folder; calls the hooks at_run_end."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_only

from .. import hooks
from ..checkpoint import manifest
from ..errors import Ended, InputError
from ..model.any_module import data_of, results_of
from ..observe.history import goodput
from ..observe.history.run import RunFile
from ..observe.loggers.run_log import RunLog
from .checkpoint import LastCheckpoint
from .console import MOST_RESULTS, figure, only_shows


class Summary(Callback):
    """Prints the results of the last validation, or how to resume."""

    validated_step = -1  # the optimizer step of the newest validation

    def __init__(self, folder: Path, calls_hooks: bool) -> None:
        self.folder = folder  # the run's
        self.calls_hooks = calls_hooks  # at the end, also after a failure

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated_step = trainer.global_step

    @rank_zero_only
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Prints how to resume, if there is a checkpoint, and calls the hooks."""
        if trainer.state.fn != "fit" or isinstance(exception, InputError):
            return
        savers = [each for each in trainer.checkpoint_callbacks if isinstance(each, LastCheckpoint)]
        if not isinstance(exception, Ended) and any(
            manifest.newest(saver.folder) for saver in savers
        ):
            print(f"\nstopped after step {trainer.global_step}; run folder: {self.folder}")
            print(
                "resume from the last checkpoint: the same command with --ckpt_path last",
                flush=True,
            )
        self._call_hooks(trainer, exception)

    @rank_zero_only
    @only_shows
    def show(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Prints the end of a finished run, on rank 0."""
        print(f"\nfinished after step {trainer.global_step}")
        results = results_of(trainer, pl_module)
        for name, value in [*results.items()][:MOST_RESULTS]:
            print(f"  {name:<21} {figure(value)}")
        if len(results) > MOST_RESULTS:
            print(f"  and {len(results) - MOST_RESULTS} more, in {self.folder / RunFile.METRICS}")
        unigram = getattr(data_of(trainer), "unigram_bits_per_byte", None)
        if unigram:
            reaches = f"a unigram model of the same tokens reaches {unigram:.4f} bits per byte"
            print(f"  for comparison, {reaches}")
        seconds = goodput.read(self.folder)
        if seconds:
            print(f"goodput           {goodput.describe(seconds)}")
        print(f"run folder        {self.folder}")
        self._call_hooks(trainer, None)

    def _call_hooks(self, trainer: L.Trainer, error: BaseException | None) -> None:
        if not self.calls_hooks:
            return
        for logger in trainer.loggers:
            if isinstance(logger, RunLog):
                logger.save()
        hooks.call("at_run_end", self.folder, error)
