"""The job must go: all ranks stop at one step boundary, with everything saved, and exit with Exit.REQUEUE."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ..cluster.launch import RUN_ID
from ..cluster.signals import asked, job_started
from ..cluster.vote import Vote
from ..errors import Ended, Exit, InputError
from .checkpoint import LastCheckpoint

TIME_IS_UP = 1  # among signals' numbers; SIGHUP, whose number it is, asks for nothing
EVERY_S = 0.25  # the ranks ask each other about so often, and not at every step of a quick model


class Preemption(Checkpoint):
    """Stop on SIGTERM or SIGUSR1 to any process of the run, and before the job's time is up.

    A `Checkpoint` to Lightning, which calls those last: all others have seen the step that is saved.

    During a validation too: it is left, and a resume makes up for it. Lightning's own handlers, which
    broadcast or save inside the handler and so deadlock unless every rank gets the signal in the same step, never run.

    Args:
        max_time: Of this job since its launch, as DD:HH:MM:SS; then it saves and exits with code 75, so leave time for
            a step and a save before the scheduler's own limit. `--trainer.max_time` means the same. null: no limit.
    """

    def __init__(self, max_time: str | timedelta | dict[str, int] | None = None) -> None:
        self.max_time = max_time
        try:
            limit_s = Timer(max_time).time_remaining()
        except MisconfigurationException as error:
            raise InputError(f"preemption.max_time {max_time!r} is no time; give DD:HH:MM:SS") from error
        self._ends = float("inf") if limit_s is None else job_started() + limit_s
        self._until_cast = 1  # boundaries
        self._since_cast, self._last_cast = 0, 0.0

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        vars(trainer._signal_connector)["register_signal_handlers"] = _nothing
        # What they leave: a broadcast and a scalar read from the device before every micro-batch.
        vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = _nothing
        if stage == "fit":
            self._vote = Vote(2)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        asked.is_answered = True
        self._begin()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.fit_loop._should_accumulate():
            self._at_boundary(trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._at_boundary(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._begin()

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._begin()

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        asked.is_answered = False  # the last checkpoint is written
        self._vote.close()

    def _begin(self) -> None:
        """Anew, with boundaries of another length."""
        self._until_cast, self._since_cast, self._last_cast = 1, 0, time.monotonic()

    def _at_boundary(self, trainer: L.Trainer) -> None:
        """Every rank comes here equally often."""
        self._until_cast -= 1
        self._since_cast += 1
        if self._until_cast > 0:
            return
        now = time.monotonic()
        pace = round(self._since_cast * EVERY_S / max(now - self._last_cast, 1e-6))  # boundaries in EVERY_S
        why, self._until_cast = self._vote.cast([self._reason(), min(pace, 100)])
        self._since_cast, self._last_cast = 0, now
        if why:
            self._end(trainer, why)

    def _reason(self) -> int:
        return asked.number or (TIME_IS_UP if time.time() >= self._ends else 0)

    def _end(self, trainer: L.Trainer, why: int) -> None:
        self._vote.close()
        savers = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, LastCheckpoint)]
        saved = any(saver.save_now(trainer) for saver in savers)  # trainer.enable_checkpointing false: there is none
        cause = f"preemption.max_time {self.max_time} is up" if why == TIME_IS_UP else signal.Signals(why).name
        raise Ended(
            Exit.REQUEUE,
            f"{cause}: stopped {'and saved ' if saved else ''}after step {trainer.global_step}. The same command goes"
            f" on from {'there' if saved else 'the newest checkpoint'}; where no scheduler gives it the run's name,"
            f" with {RUN_ID}={os.environ.get(RUN_ID)}.",
        )


def _nothing(*_: Any) -> None:
    pass
