"""Prints the end of a run: validation, run folder, next commands; calls the hooks at_run_end."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from .. import hooks
from ..checkpoint import manifest
from ..errors import Ended, InputError
from ..model.any_module import data_of, results_of
from ..observe.history import goodput
from ..observe.loggers.run_log import RunLog
from ..project import program_name, without
from .checkpoint import LastCheckpoint
from .console import figure, only_shows


class Summary(Callback):
    """Keeps the first validation's result across restarts, and prints it with the last.

    Args:
        folder: The run's folder.
        calls_hooks: Whether to call the hooks at the end, also after a failure.
    """

    def __init__(self, folder: Path, calls_hooks: bool) -> None:
        self.folder = folder
        self.calls_hooks = calls_hooks
        self.first: dict[str, float] = {}
        self.validated_step = -1  # the optimizer step of the newest validation

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.first = state_dict["first"]

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.first = self.first or dict(results_of(trainer, pl_module))
        if not trainer.sanity_checking:
            self.validated_step = trainer.global_step

    @rank_zero_only
    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Prints how to resume, if there is a checkpoint, and calls the hooks."""
        if trainer.state.fn != "fit" or isinstance(exception, InputError):
            return
        if not isinstance(exception, Ended):
            self._print_how_to_resume(trainer)
        self._call_hooks(trainer, exception)

    def _print_how_to_resume(self, trainer: Any) -> None:
        if _has_checkpoint(trainer):
            print(f"\nstopped after step {trainer.global_step}; run folder: {self.folder}")
            if not _is_launched(trainer):
                print(f"resume from the last checkpoint:  {_command('fit')} --ckpt_path last")
            sys.stdout.flush()

    @rank_zero_only
    @only_shows
    def show(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Prints the end of a finished run, on rank 0."""
        data = data_of(trainer)
        print(f"\nfinished after step {trainer.global_step}")
        for name, value in results_of(trainer, pl_module).items():
            first = f"{figure(self.first[name])} at the start -> " if name in self.first else ""
            unigram = getattr(data, "unigram_bits_per_byte", None)
            baseline = ""
            if name == "eval/bits_per_byte" and unigram:
                baseline = f"   (a unigram model of the same tokens: {unigram:.4f})"
            print(f"  {name:<22}{first}{figure(value)}{baseline}")
        samples = self.folder / "samples.txt"
        if samples.exists():
            newest = samples.read_text(encoding="utf-8").rsplit("--- step ", 1)[-1]
            print("generated sample:")
            for line in newest.rstrip().splitlines()[1:]:
                print(f"  | {line}")
        if seconds := goodput.read(self.folder):
            print(f"goodput           {goodput.describe(seconds)}")
        print(f"run folder        {self.folder}")
        self._call_hooks(trainer, None)
        for line in self._next_commands(trainer, data):
            print(line)

    def _next_commands(self, trainer: Any, data: Any) -> Iterator[str]:
        """Yields the commands that this run has the files for."""
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                yield f"TensorBoard       tensorboard --logdir {Path(logger.log_dir).parent}"
        if not _has_checkpoint(trainer):
            return
        if getattr(data, "test_share", 1):
            yield f"evaluate          {_command('test')} --ckpt_path last"
        if hasattr(data, "predict_dataloader") and getattr(data, "prompts", None):
            yield f"generate          {_command('predict')} --ckpt_path last"
        if not _is_launched(trainer):
            limit, now = "max_steps", trainer.global_step
            if trainer.max_steps < 0:
                limit, now = "max_epochs", trainer.current_epoch
            again = _command("fit", but=f"--trainer.{limit}")
            yield f"continue training {again} --ckpt_path last --trainer.{limit} {2 * max(1, now)}"

    def _call_hooks(self, trainer: L.Trainer, error: BaseException | None) -> None:
        if not self.calls_hooks:
            return
        for logger in trainer.loggers:
            if isinstance(logger, RunLog):
                logger.save()
        hooks.at_run_end(self.folder, error)


def _has_checkpoint(trainer: Any) -> bool:
    savers = [each for each in trainer.checkpoint_callbacks if isinstance(each, LastCheckpoint)]
    return any(manifest.newest(saver.folder) for saver in savers)


def _is_launched(trainer: Any) -> bool:
    """Returns whether an external launcher, which has its own command, started the processes."""
    environment: Any = getattr(trainer.strategy, "cluster_environment", None)
    return environment is not None and environment.creates_processes_externally


def _command(verb: str, but: str = "--ckpt_path") -> str:
    """Returns this command line with another verb, without the checkpoint and the flag `but`."""
    python = "python" if shutil.which("python") == sys.executable else sys.executable
    flags = without(sys.argv[2:], "--ckpt_path", but)
    return shlex.join([python, "-m", program_name(), verb, *flags])
