"""Reports progress to `cluster/watchdog.py`, and sets the timeout of every process group."""

import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn

from ..cluster.watchdog import WATCHDOG
from ..compat.lightning import accumulates, timeout_of
from ..compat.torch import limit_collectives, process_groups
from ..errors import check_least
from ..parallel import rank_view
from ..project import has_command_line
from ..ranges import Timeout

LATER_S = 60.0  # collectives time out later than the watchdog, which can name the stalled rank


class Watchdog(Callback):
    """Ends a training that hangs, with the stacks of all threads and the name of the stalled rank.

    Progress is a batch of training or validation, its forward or backward pass, and the start of a
    checkpoint. If one of these takes longer, for example writing a very large checkpoint, raise the
    limit.

    Args:
        timeout_s: Seconds without progress after which all ranks exit with code 71. 0 turns it off.
        start_timeout_s: The same from the process's start to the end of the first optimizer step. 0
            turns it off."""

    def __init__(self, timeout_s: Timeout = 600.0, start_timeout_s: Timeout = 1800.0) -> None:
        check_least("watchdog", timeout_s=(timeout_s, 0), start_timeout_s=(start_timeout_s, 0))
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self._step = self._batch = -1
        self._eval_batch = -1

    def begin(self, trainer: L.Trainer, run: Path) -> None:
        """Starts the watchdog. `run` is the run's folder."""
        WATCHDOG.start(self.start_timeout_s)
        WATCHDOG.position = lambda phase: self._position(trainer, phase)

    def _position(self, trainer: L.Trainer, phase: str) -> str:
        """Describes where training is; called from the watchdog's thread."""
        if trainer.evaluating or trainer.sanity_checking or trainer.predicting:
            batch = f"batch {self._eval_batch + 1}"
            return f"validation at step {trainer.global_step}, {batch}, {phase}"
        step, batch = self._step, self._batch
        if phase == "in its data loader":
            step, batch = trainer.global_step + 1, batch + 1
        elif step < 0:
            return f"start-up, {phase}"
        number = batch % trainer.accumulate_grad_batches + 1
        layers = rank_view(trainer.strategy).layers
        return f"step {step}, {layers}micro-batch {number}, {phase}"

    # ---- progress --------------------------------------------------------------------------------

    def _beat(self, *args: Any, **kwargs: Any) -> None:
        WATCHDOG.beat()

    on_before_backward = on_after_backward = on_before_optimizer_step = _beat
    on_save_checkpoint = on_load_checkpoint = _beat
    on_validation_end = on_test_end = on_predict_end = _beat

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        WATCHDOG.beat()
        if WATCHDOG.is_exiting:  # this error is a consequence; the watchdog reports the cause
            time.sleep(10)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: object, batch: object, batch_idx: int
    ) -> None:
        self._step, self._batch = trainer.global_step + 1, batch_idx
        WATCHDOG.batches, WATCHDOG.has_ended = batch_idx + 1, False
        WATCHDOG.beat()

    def on_train_batch_end(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        WATCHDOG.beat()
        WATCHDOG.has_ended = trainer.is_last_batch
        if WATCHDOG.limit_s != self.timeout_s and not accumulates(trainer):
            self._started(trainer)

    def on_validation_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: object,
        batch: object,
        batch_idx: int,
        *_: object,
        **__: object,
    ) -> None:
        self._eval_batch = batch_idx
        WATCHDOG.beat()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_validation_batch_end(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        WATCHDOG.beat()
        if WATCHDOG.limit_s != self.timeout_s and trainer.state.fn != TrainerFn.FITTING:
            self._started(trainer)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    # ---- limits ----------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: object, stage: str) -> None:
        if not has_command_line():  # a Trainer of one's own: nothing has started it
            self.begin(trainer, Path(trainer.default_root_dir))
        self.on_fit_start(trainer, pl_module)

    def on_fit_start(self, trainer: L.Trainer, pl_module: object) -> None:
        WATCHDOG.beat()
        limit_groups(trainer, max(self.timeout_s, self.start_timeout_s))

    on_train_start = on_fit_start  # the strategy, or DeepSpeed, has created more groups

    def _started(self, trainer: L.Trainer) -> None:
        """Switches to the limit of a step: everything is built and compiled."""
        WATCHDOG.limit_s = self.timeout_s
        limit_groups(trainer, self.timeout_s)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        WATCHDOG.beat()
        if not has_command_line():
            WATCHDOG.stop()


def limit_groups(trainer: L.Trainer, limit_s: float) -> None:
    """Sets the timeout of all process groups; torch's own applies to the first one only. A
    `timeout` of the strategy other than Lightning's default has priority."""
    if not dist.is_initialized():
        return
    limit = timeout_of(trainer.strategy)
    if limit == default_pg_timeout and limit_s:
        limit = timedelta(seconds=limit_s + LATER_S)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a backend other than gloo and NCCL has no timeout
        for group in process_groups():
            limit_collectives(group, limit)
