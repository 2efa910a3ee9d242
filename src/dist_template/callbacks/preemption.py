"""Preemption: all ranks stop at the same step boundary, save, and exit with Exit.REQUEUE."""

import os
import shlex
import signal
import time
from collections.abc import Sequence
from datetime import timedelta

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint, Timer, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ..cluster.launch import Variable
from ..cluster.signals import job_started, listen, stop_request
from ..compat.lightning import has_passed, leave_signals_alone
from ..compat.steps import StepCallback
from ..errors import Ended, Exit, InputError
from ..model.any_module import callbacks_of
from ..project import has_command_line
from .checkpoint import LastCheckpoint

TIME_IS_UP = 1  # shares a number with SIGHUP, which is not handled
MOST_WITHOUT_STEP = 1000  # batches, of a module that optimizes manually
EVERY_S = 0.25  # about the time between two votes; a step may be much shorter


class Preemption(StepCallback, Checkpoint):
    """Stops on SIGTERM or SIGUSR1 to any process of the run, and when the job's time is up.

    It is a `Checkpoint`, because Lightning calls those last. A validation is interrupted, and
    repeated by the resumed run. Lightning's own signal handlers never run: they broadcast or save
    inside the handler, which deadlocks unless every rank gets the signal in the same step.

    Args:
        max_time: Time of this job since its launch, as DD:HH:MM:SS; then it saves and exits with
            code 75. Leave time for a step and a save before the scheduler's own limit. Same as
            `--trainer.max_time`. null: no limit."""

    def __init__(self, max_time: str | timedelta | dict[str, int] | None = None) -> None:
        self.max_time = max_time
        try:
            limit_s = Timer(max_time).time_remaining()
        except MisconfigurationException as error:
            sentence = f"preemption.max_time {max_time!r} is not a time; give DD:HH:MM:SS"
            raise InputError(sentence) from error
        self._ends = float("inf") if limit_s is None else job_started() + limit_s
        self._until_vote, self._since_vote = 1, 0  # boundaries
        self._without_step = 0  # batches since the newest optimizer step
        self._last_vote = time.monotonic()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        leave_signals_alone(trainer)
        if not has_command_line():
            listen()
        if stage == "fit":
            self._vote = Vote()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stop_request.is_handled = True

    def on_step_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object) -> None:
        # A checkpoint has no gradients: one that accumulates them itself stops where it steps.
        is_between = not pl_module.automatic_optimization and not has_passed(trainer, 1)
        if is_between and self._without_step < MOST_WITHOUT_STEP:
            self._without_step += 1
            return
        self._without_step = 0
        self._at_boundary(trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._at_boundary(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._until_vote = 1  # its batches and steps of training differ in length

    on_validation_end = on_validation_start

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stop_request.is_handled = False  # the last checkpoint is written
        self._vote.close()

    def _at_boundary(self, trainer: L.Trainer) -> None:
        """Votes about every EVERY_S seconds. Every rank calls it equally often."""
        self._until_vote -= 1
        self._since_vote += 1
        if self._until_vote > 0:
            return
        now = time.monotonic()
        # Boundaries in EVERY_S:
        pace = round(self._since_vote * EVERY_S / max(now - self._last_vote, 1e-6))
        request = stop_request.number
        if not request and time.time() >= self._ends:
            request = TIME_IS_UP
        reason, self._until_vote = self._vote.cast([request, min(pace, 100)])
        self._since_vote, self._last_vote = 0, now
        if reason:
            self._end(trainer, reason)

    def _end(self, trainer: L.Trainer, reason: int) -> None:
        self._vote.close()
        for each in callbacks_of(trainer):
            if trainer.validating and isinstance(each, WeightAveraging):  # it validates averages
                each.on_validation_epoch_end(trainer, trainer.lightning_module)
        savers = [each for each in trainer.checkpoint_callbacks if isinstance(each, LastCheckpoint)]
        stopped, start = "stopped", "the newest checkpoint"
        if any(saver.save_now(trainer) for saver in savers):
            stopped, start = "stopped and saved", "there"
        cause = signal.Signals(reason).name
        if reason == TIME_IS_UP:
            cause = f"preemption.max_time {self.max_time} is up"
        how = f"The same command resumes from {start}"
        name = os.environ.get(Variable.RUN_ID)
        if name:  # a user's own Trainer has none
            how += "; without a scheduler that sets the run's name, set"
            how += f" {Variable.RUN_ID}={shlex.quote(name)}"
        raise Ended(Exit.REQUEUE, f"{cause}: {stopped} after step {trainer.global_step}. {how}.")


class Vote:
    """The maxima over all ranks of two integers, with one vote of delay, so that no rank waits.

    A vote starts an all-reduce on the CPU and returns the result of the vote before, which had at
    least a step's time to complete; every rank reads the same result at the same vote. If
    training's process group is on GPUs, the votes use a gloo group of their own, whose creation is
    collective."""

    def __init__(self) -> None:
        self._is_alone = not dist.is_initialized()
        shares = self._is_alone or dist.get_backend() == dist.Backend.GLOO
        self._group = None if shares else dist.new_group(backend="gloo")
        self._box = torch.zeros(2, dtype=torch.int64)
        self._work: dist.Work | None = None

    def cast(self, numbers: Sequence[int]) -> list[int]:
        """Votes, on every rank equally often, and returns the maxima of the vote before: zeros at
        the first."""
        self.close()
        agreed = self._box.numpy().tolist()  # NumPy: a test counts device reads by torch
        self._box = torch.tensor(numbers, dtype=torch.int64)
        if not self._is_alone:
            self._work = dist.all_reduce(self._box, dist.ReduceOp.MAX, self._group, async_op=True)
        return agreed

    def close(self) -> None:
        """Waits for the last vote: a process that exits during a collective may be aborted."""
        if self._work is not None:
            self._work.wait()
            self._work = None
