"""Records each training step on every rank, so that a killed run leaves a record up to its last step.

Writes lines of JSON into `rank<N>.jsonl`, each with an `event`:

    run         folder, dp_rank (data-parallel rank), dp_size
    rows        step, micro_batch, rows (a hash of each sequence), random (a hash of the random state before it)
    gradients   tensors (see `replicas`): gradients of the first optimizer step, before clipping
    step        step, metrics (that the module logged), tensors (see `replicas`), and from training_state.py: optimizer,
                rates, python (before the first step all of it, later the changes since then); before the first step
                also buffers: the names among `tensors` that are buffers
    eval        step, stage (sanity, validate, test), metrics
    end         step

Rank 0 also saves the unsharded weights as `start.pt` and `end.pt`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..model.any_module import metrics_of, results_of
from ..weights import gather, is_partitioned_by_zero
from . import training_state


class Recorder(Callback):
    """Records without changing the training. `trainer.log_every_n_steps` should be 1: it records logged metrics.

    Args:
        folder: Destination.
        rank: This process's rank.
        run: The run folder, which has the checkpoints.
    """

    def __init__(self, folder: Path, rank: int, run: Path) -> None:
        self.folder = folder
        self.rank = rank
        self.run = run
        self._recorded_step = -1
        self._start: dict[str, str] = {}
        self._has_gradients = False
        self._file = (folder / f"rank{rank}.jsonl").open("a", encoding="utf-8", buffering=1)

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        single = {"rank": 0, "num_replicas": 1}
        sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", single)
        self._write("run", folder=str(self.run), dp_rank=sampler["rank"], dp_size=sampler["num_replicas"])

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._recorded_step = trainer.global_step
        self._save_weights("start", pl_module)
        self._start = training_state.python_state(trainer, pl_module)
        buffers = [name for name, _ in pl_module.named_buffers()]
        self._write_step(trainer, pl_module, {}, self._start, buffers=buffers)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        rows = [fingerprint(sample) for sample in samples_in(batch)]
        random = fingerprint(torch.get_rng_state())
        self._write("rows", step=trainer.global_step + 1, micro_batch=batch_idx, rows=rows, random=random)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        if not self._has_gradients:
            self._has_gradients = True
            tensors = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
            self._write("gradients", tensors={name: _replica(grad) for name, grad in tensors.items()})

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self._recorded_step:
            self._recorded_step = trainer.global_step
            python = training_state.python_state(trainer, pl_module)
            changed = {name: value for name, value in python.items() if self._start.get(name) != value}
            self._write_step(trainer, pl_module, metrics_of(pl_module).latest, changed)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        stage = "sanity" if trainer.sanity_checking else "validate"
        self._write("eval", step=trainer.global_step, stage=stage, metrics=results_of(trainer, pl_module))

    def on_test_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._write("eval", step=trainer.global_step, stage="test", metrics=results_of(trainer, pl_module))

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._save_weights("end", pl_module)
        self._write("end", step=trainer.global_step)

    def _write_step(self, trainer: L.Trainer, module: Any, metrics: Any, python: dict[str, str], **more: Any) -> None:
        tensors, optimizer = dict(replicas(module)), training_state.optimizer_state(trainer, module)
        kept = {"optimizer": optimizer, "rates": training_state.learning_rates(trainer), "python": python}
        self._write("step", step=trainer.global_step, metrics=metrics, tensors=tensors, **kept, **more)

    def _save_weights(self, name: str, module: nn.Module) -> None:
        weights = gather(module)  # collective
        if self.rank == 0:
            torch.save(weights, self.folder / f"{name}.pt")

    def _write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, **values}) + "\n")


def samples_in(batch: Any) -> Tensor:
    """The first dimension's samples: `input_ids` of text, else the first tensor that is found."""
    if isinstance(batch, Mapping):
        return samples_in(batch["input_ids"] if "input_ids" in batch else next(iter(batch.values())))
    return samples_in(batch[0]) if isinstance(batch, list | tuple) else batch


def replicas(module: nn.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields (name, (shard, hash)) of this rank's parameters and buffers.

    Ranks with the same shard of a tensor must have the same hash. `shard` is "" for an unsharded tensor, and its
    coordinate for a sharded one. ZeRO-3's partitions are skipped: no two ranks hold the same.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not is_partitioned_by_zero(tensor):
            yield name, _replica(tensor)


def _replica(tensor: Tensor) -> tuple[str, str]:
    return _shard(tensor), fingerprint(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def _shard(tensor: Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return ""
    coordinate = tensor.device_mesh.get_coordinate() or []
    pairs = zip(coordinate, tensor.placements, strict=True)
    return " ".join(f"{placement}:{index}" for index, placement in pairs if not placement.is_replicate())


def fingerprint(tensor: Tensor) -> str:
    """Returns a hash of the tensor's bits."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=8).hexdigest()
