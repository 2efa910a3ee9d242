"""Records what a training does while it does it, on every rank: a killed run leaves all up to its last step.

Lines of JSON in `rank<N>.jsonl`, each with an `event`:

    run         folder, dp_rank (which distinct batches this rank sees), dp_size
    rows        step, micro_batch, rows (a hash of each sequence), random (a hash of the random state before it)
    gradients   tensors: of the first optimizer step, before clipping (see `replicas`)
    step        step, metrics (what the module logged), tensors (see `replicas`), and of state.py: optimizer, rates,
                python (all of it before the first step, later what has changed since); before the first step also
                buffers: the names among `tensors` that are no parameters
    eval        step, stage (sanity, validate, test), metrics
    end         step

Rank 0 also keeps the unsharded weights, as `start.pt` and `end.pt`.
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

from ..weights import gather, is_partitioned_by_zero
from . import state


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
        self._start: dict[str, str] = {}
        self._has_gradients = False
        self._file = (folder / f"rank{rank}.jsonl").open("a", encoding="utf-8", buffering=1)

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        alone = {"rank": 0, "num_replicas": 1}
        dealt = getattr(trainer.strategy, "distributed_sampler_kwargs", alone)
        self._write("run", folder=str(self.run), dp_rank=dealt["rank"], dp_size=dealt["num_replicas"])

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._recorded_step = trainer.global_step
        self._save_weights("start", pl_module)
        self._start = state.python_state(trainer, pl_module)
        buffers = [name for name, _ in pl_module.named_buffers()]
        self._write_step(trainer, pl_module, {}, self._start, buffers=buffers)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        samples = batch["input_ids"] if "input_ids" in batch else next(iter(batch.values()))
        rows = [fingerprint(sample) for sample in samples]
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
            python = state.python_state(trainer, pl_module)
            changed = {name: value for name, value in python.items() if self._start.get(name) != value}
            self._write_step(trainer, pl_module, pl_module.metrics.latest, changed)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        stage = "sanity" if trainer.sanity_checking else "validate"
        self._write("eval", step=trainer.global_step, stage=stage, metrics=pl_module.eval_metrics)

    def on_test_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._write("eval", step=trainer.global_step, stage="test", metrics=pl_module.eval_metrics)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._save_weights("end", pl_module)
        self._write("end", step=trainer.global_step)

    def _write_step(self, trainer: L.Trainer, module: Any, metrics: Any, python: dict[str, str], **more: Any) -> None:
        tensors, optimizer = dict(replicas(module)), state.optimizer_state(trainer, module)
        kept = {"optimizer": optimizer, "rates": state.learning_rates(trainer), "python": python}
        self._write("step", step=trainer.global_step, metrics=metrics, tensors=tensors, **kept, **more)

    def _save_weights(self, name: str, module: nn.Module) -> None:
        weights = gather(module)  # all ranks take part
        if self.rank == 0:
            torch.save(weights, self.folder / f"{name}.pt")

    def _write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, **values}) + "\n")


def replicas(module: nn.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name, (part, hash)) of this rank's parameters and buffers.

    Ranks that hold the same part of a tensor must have the same hash. `part` is "" for an unsharded tensor, the
    coordinate among the shards for a sharded one. ZeRO-3's parts are skipped: no two ranks hold the same.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not is_partitioned_by_zero(tensor):
            yield name, _replica(tensor)


def _replica(tensor: Tensor) -> tuple[str, str]:
    return _part(tensor), fingerprint(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


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
