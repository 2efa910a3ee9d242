"""What a training does, written down by every rank while it does it: a killed run leaves all up to its last step.

Lines of JSON in `rank<N>.jsonl`, each with an `event`:

    run      folder, dp_rank (which distinct batches this rank sees), dp_size
    rows     step, micro_batch, rows (a hash of each sequence), random (a hash of the random state before it)
    step     step, metrics (what the module logged), tensors (see `replicas`)
    eval     step, stage (sanity, validate, test), metrics
    end      step

Rank 0 also keeps the whole weights, as `start.pt` and `end.pt`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..parallel.weights import gather, is_partitioned_by_zero


class Recorder(Callback):
    """Writes; changes nothing of the training. It sees what is logged: `trainer.log_every_n_steps` should be 1.

    Args:
        folder: Where to.
        rank: Whose file it is.
        run: The run's own folder, where its checkpoints are.
    """

    def __init__(self, folder: Path, rank: int, run: Path) -> None:
        self.folder = folder
        self.rank = rank
        self.run = run
        self._recorded_step = -1
        self._file = (folder / f"rank{rank}.jsonl").open("a", encoding="utf-8", buffering=1)

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        alone = {"rank": 0, "num_replicas": 1}
        dealt = getattr(trainer.strategy, "distributed_sampler_kwargs", alone)
        self._write("run", folder=str(self.run), dp_rank=dealt["rank"], dp_size=dealt["num_replicas"])

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._recorded_step = trainer.global_step
        self._save_weights("start", pl_module)
        self._write("step", step=trainer.global_step, metrics={}, tensors=dict(replicas(pl_module)))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        samples = batch["input_ids"] if "input_ids" in batch else next(iter(batch.values()))
        rows = [fingerprint(sample) for sample in samples]
        random = fingerprint(torch.get_rng_state())
        self._write("rows", step=trainer.global_step + 1, micro_batch=batch_idx, rows=rows, random=random)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step != self._recorded_step:
            self._recorded_step = step
            self._write("step", step=step, metrics=pl_module.metrics.latest, tensors=dict(replicas(pl_module)))

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        stage = "sanity" if trainer.sanity_checking else "validate"
        self._write("eval", step=trainer.global_step, stage=stage, metrics=pl_module.eval_metrics)

    def on_test_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._write("eval", step=trainer.global_step, stage="test", metrics=pl_module.eval_metrics)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._save_weights("end", pl_module)
        self._write("end", step=trainer.global_step)

    def _save_weights(self, name: str, module: nn.Module) -> None:
        weights = gather(module)  # all ranks take part
        if self.rank == 0:
            torch.save(weights, self.folder / f"{name}.pt")

    def _write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, **values}) + "\n")


def replicas(module: nn.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name, (part, hash)) of this rank's parameters and buffers.

    Ranks that hold the same part of a tensor must have the same hash. `part` is "" for a whole tensor, the place among
    the shards for a sharded one. ZeRO-3's parts are left out: no two ranks hold the same.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not is_partitioned_by_zero(tensor):
            yield name, (_part(tensor), fingerprint(tensor.to_local() if isinstance(tensor, DTensor) else tensor))


def _part(tensor: Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return ""
    place = tensor.device_mesh.get_coordinate() or []
    cut = [(i, p) for i, p in zip(place, tensor.placements, strict=True) if not p.is_replicate()]
    return " ".join(f"{placement}:{index}" for index, placement in cut)


def fingerprint(tensor: Tensor) -> str:
    """Equal for equal bits."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=8).hexdigest()
