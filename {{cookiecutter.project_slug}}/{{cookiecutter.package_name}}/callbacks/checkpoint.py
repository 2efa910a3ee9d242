"""When checkpoints are written: the last one for resuming, the best one for keeping."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


class LastCheckpoint(ModelCheckpoint):
    """`last.ckpt`, every so many optimizer steps and at the end; what `--ckpt_path last` resumes.

    Args:
        every_n_steps: Optimizer steps between two checkpoints.
        dirpath: The folder.
    """

    def __init__(self, every_n_steps: int = 100, dirpath: str = "{run}/checkpoints") -> None:
        super().__init__(
            dirpath=dirpath,
            filename="last",
            every_n_train_steps=every_n_steps,
            save_top_k=1,
            monitor=None,
            enable_version_counter=False,
        )

    @property
    def state_key(self) -> str:
        return type(self).__name__  # without the arguments: a run may resume with others

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Right after a resume Lightning would also save in the middle of an accumulation window; resuming from
        # such a file diverges, because the gradients gathered so far are in no checkpoint.
        if not trainer.fit_loop._should_accumulate():
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step != self._last_global_step_saved:
            trainer.save_checkpoint(f"{self.dirpath}/last.ckpt")


class BestCheckpoint(ModelCheckpoint):
    """The checkpoint with the lowest validation loss, as `best-step<N>.ckpt`.

    Args:
        monitor: The validation metric that decides.
        mode: Whether the lowest ("min") or the highest ("max") is best.
        keep: How many to keep. 0 turns it off.
        dirpath: The folder.
    """

    def __init__(
        self, monitor: str = "eval/loss", mode: str = "min", keep: int = 1, dirpath: str = "{run}/checkpoints"
    ) -> None:
        super().__init__(
            dirpath=dirpath,
            filename="best-step{step}",
            auto_insert_metric_name=False,
            monitor=monitor,
            mode=mode,
            save_top_k=keep,
        )

    @property
    def state_key(self) -> str:
        return type(self).__name__
