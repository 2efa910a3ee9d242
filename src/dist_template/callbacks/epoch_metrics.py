"""Metrics of an epoch in checkpoints: a resumed epoch ends with the metrics of all its batches.

Lightning saves nothing of what `self.log(on_epoch=True)` has summed, so that a resumed epoch's
metrics are of its rest, and a plateau decides by them. Each rank has sums of its own, and a
checkpoint has one dictionary, so all are gathered into it."""

from functools import reduce
from typing import Any

import lightning as L
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn

from .. import processes
from ..compat.epoch_metrics import (
    merged,
    metric_states,
    newest_metrics,
    put,
    put_metric_states,
    put_newest_metrics,
    summed,
)
from ..compat.lightning import metrics_group

KEY = "epoch_metrics"  # of a checkpoint: one dictionary per rank


class EpochMetrics(Callback):
    """Saves and restores what has been logged in an epoch that is not over.

    A run that resumes on another number of ranks gives the sums of all to rank 0; metrics of
    torchmetrics then start anew, with a warning."""

    def __init__(self) -> None:
        self._saved: dict[str, Any] = {}
        self._batches = 0  # of this process, since the sums were loaded

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        ranks = checkpoint.get(KEY)
        if not ranks:
            return
        if len(ranks) == trainer.world_size:
            self._saved = ranks[trainer.global_rank]
        else:
            if any(rank["metrics"] for rank in ranks):
                rank_zero_warn(
                    f"The checkpoint has the torchmetrics of {len(ranks)} ranks and there are"
                    f" {trainer.world_size} now: those of the present epoch are of its rest."
                )
            sums = reduce(merged, (rank["sums"] for rank in ranks))
            self._saved = {
                "sums": sums if trainer.is_global_zero else {},
                "metrics": {},
                "newest": ranks[0]["newest"],
            }

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._batches = 0
        put_metric_states(pl_module, self._saved.get("metrics", {}))
        put_newest_metrics(trainer, self._saved.get("newest", {}))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._batches:
            # Again: many modules reset them in on_train_start, for the sanity check's sake.
            put_metric_states(pl_module, self._saved.get("metrics", {}))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if batch_idx and not self._batches:
            # And again: the module may reset them when the resumed epoch starts.
            put_metric_states(pl_module, self._saved.get("metrics", {}))
        self._batches += 1
        if self._saved and self._batches > 1:  # in the first, `self.log` clears what it finds
            self._put(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._put(trainer, pl_module)

    def _put(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        sums, self._saved = self._saved.get("sums", {}), {}
        put(trainer, module, sums)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        own = {
            "sums": merged(summed(trainer), self._saved.get("sums", {})),
            "metrics": metric_states(pl_module),
            "newest": newest_metrics(trainer),
        }
        ranks = processes.to_rank_zero(own, metrics_group(trainer))
        if not ranks:  # rank 0 writes them; under ZeRO-3 each rank reads its own file
            ranks = [{"sums": {}, "metrics": {}, "newest": own["newest"]}] * trainer.world_size
            ranks[trainer.global_rank] = own
        checkpoint[KEY] = ranks
