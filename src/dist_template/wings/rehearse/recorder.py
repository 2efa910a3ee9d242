"""Records each training step on every rank; a killed run leaves a record up to its last step.

Writes lines of JSON into `rank<N>.jsonl`, each with an `event`:

    run         folder, dp_rank (data-parallel rank), dp_size
    rows        step, micro_batch, rows (a hash of each sequence), random (of the state before it)
    gradients   tensors (see `replicas`): gradients of the first optimizer step, before clipping
    step        step, metrics (that the module logged), tensors (see `replicas`), and from
                py: optimizer, rates, python (before the first step all of it, later
                the changes since then); before the first step also buffers: their names
    eval        step, stage (sanity, validate, test), metrics
    end         step

Rank 0 also saves the unsharded weights as `start.pt` and `end.pt`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from ...layout import local_shard, shard_place
from ...model.any_module import metrics_of, results_of
from ...parallel import run_strategy
from ...weights import gather, is_partitioned_by_zero

OF_LIGHTNING = set(vars(L.LightningModule())) | set(vars(Callback()))
NOT_TRAINING = {"eval_metrics", "metrics", "metric_buffer", "prepare_data_per_node"}
NOT_TRAINING |= {"allow_zero_length_dataloader_with_multiple_devices"}
NOT_TRAINING |= {"_external_params"}  # ZeRO-3 notes what else a module reads
MAX_ITEMS = 1000  # a larger container is data, not state


class Recorder(Callback):
    """Records without changing the training. log_every_n_steps should be 1, for the metrics.

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
        rank, size = run_strategy(trainer.strategy).data_rank
        self._write("run", folder=str(self.run), dp_rank=rank, dp_size=size)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._recorded_step = trainer.global_step
        self._save_weights("start", pl_module)
        self._start = python_state(trainer, pl_module)
        buffers = [name for name, _ in pl_module.named_buffers()]
        self._write_step(trainer, pl_module, {}, self._start, buffers=buffers)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        rows = [fingerprint(sample) for sample in samples_in(batch)]
        random, step = fingerprint(torch.get_rng_state()), trainer.global_step + 1
        self._write("rows", step=step, micro_batch=batch_idx, rows=rows, random=random)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        if not self._has_gradients:
            self._has_gradients = True
            parameters = pl_module.named_parameters()
            found = {name: _replica(p.grad) for name, p in parameters if p.grad is not None}
            self._write("gradients", tensors=found)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step != self._recorded_step:
            self._recorded_step = trainer.global_step
            python = python_state(trainer, pl_module)
            changed = {k: value for k, value in python.items() if self._start.get(k) != value}
            self._write_step(trainer, pl_module, metrics_of(pl_module).latest, changed)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        stage = "sanity" if trainer.sanity_checking else "validate"
        metrics = results_of(trainer, pl_module)
        self._write("eval", step=trainer.global_step, stage=stage, metrics=metrics)

    def on_test_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        metrics = results_of(trainer, pl_module)
        self._write("eval", step=trainer.global_step, stage="test", metrics=metrics)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._save_weights("end", pl_module)
        self._write("end", step=trainer.global_step)

    def _write_step(
        self, trainer: L.Trainer, module: Any, metrics: Any, python: Any, **more: Any
    ) -> None:
        self._write(
            "step",
            step=trainer.global_step,
            metrics=metrics,
            tensors=dict(replicas(module)),
            optimizer=optimizer_state(trainer, module),
            rates=learning_rates(trainer),
            python=python,
            **more,
        )

    def _save_weights(self, name: str, module: nn.Module) -> None:
        weights = gather(module)  # collective
        if self.rank == 0:
            torch.save(weights, self.folder / f"{name}.pt")

    def _write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, **values}) + "\n")


def samples_in(batch: Any) -> Tensor:
    """Returns the tensor whose rows are the samples: of text its tokens, else the first tensor."""
    if isinstance(batch, Mapping):
        first = next(iter(batch.values()))
        return samples_in(batch.get("whole_input_ids", batch.get("input_ids", first)))
    return samples_in(batch[0]) if isinstance(batch, list | tuple) else batch


def labels_in(batch: Any) -> Any:
    """Returns the tensor whose rows are the samples' labels: `labels`, or the second of a tuple; an
    empty tuple if there is none, or if ranks share sequences and have parts of the labels."""
    if isinstance(batch, Mapping) and "whole_input_ids" in batch:
        return ()
    found = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(batch, list | tuple) and len(batch) > 1:
        found = batch[1]
    return found if isinstance(found, Tensor) and found.ndim else ()


def replicas(module: nn.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields (name, (shard, hash)) of this rank's parameters and buffers.

    Ranks with the same shard of a tensor must have the same hash. `shard` is "" for an unsharded
    tensor, and its coordinate for a sharded one. ZeRO-3's partitions are skipped: no two ranks hold
    the same.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not is_partitioned_by_zero(tensor):
            yield name, _replica(tensor)


def _replica(tensor: Tensor) -> tuple[str, str]:
    return shard_place(tensor), fingerprint(tensor)


def optimizer_state(trainer: Any, module: nn.Module) -> dict[str, str]:
    """Returns {"parameter: field": hash of this rank's shard} of every optimizer."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, str] = {}
    for optimizer in trainer.optimizers:
        state = getattr(optimizer, "state", {})
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"parameter {index}")
                for field, value in state.get(parameter, {}).items():
                    found[f"{name}: {field}"] = _hash(value) or ""
    return found


def learning_rates(trainer: Any) -> list[float]:
    """Returns the learning rate of every parameter group for the next step."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return [float(group["lr"]) for group in groups]


def python_state(trainer: Any, module: nn.Module) -> dict[str, str]:
    """Returns {"NAME.attribute": hash} of plain values, tensors, generators and their containers.

    These are attributes of the module, all its submodules and the user's callbacks, without
    parameters and buffers (checkpoints have them) and without Lightning's attributes.
    """
    owners: list[tuple[str, Any]] = [*module.named_modules()]
    library = __name__.split(".")[0]
    for callback in trainer.callbacks:
        if not type(callback).__module__.startswith((f"{library}.", "lightning.")):
            owners.append((type(callback).__name__, callback))
    found: dict[str, str] = {}
    for name, owner in owners:
        for key, value in vars(owner).items():
            if key in OF_LIGHTNING or key in NOT_TRAINING:
                continue
            if (value := _hash(value)) is not None:
                found[f"{name}.{key}".lstrip(".")] = value
    return found


def _hash(value: Any) -> str | None:
    """Returns a hash, which starts with "tensor" if the value holds one; None for other objects."""
    if isinstance(value, Tensor):
        return None if value.is_meta else f"tensor {fingerprint(value)}"
    if isinstance(value, nn.Module):  # in a container or a callback; checkpoints have the module's
        return _hash_of_items([*value.state_dict().items()])
    if isinstance(value, torch.Generator):
        return f"generator {fingerprint(value.get_state())}"
    if isinstance(value, random.Random):
        return f"generator {_digest(repr(value.getstate()).encode())}"
    if isinstance(value, np.random.Generator):
        return f"generator {_digest(repr(value.bit_generator.state).encode())}"
    if isinstance(value, np.ndarray):
        return f"array {_digest(value.tobytes())}"
    if isinstance(value, Mapping):
        return _hash_of_items([*value.items()])
    if isinstance(value, list | tuple | deque):
        return _hash_of_items([*value])
    is_plain = isinstance(value, bool | int | float | str | None | np.generic)
    return repr(value) if is_plain else None


def _hash_of_items(items: list[Any]) -> str | None:
    parts = [_hash(item) for item in items] if len(items) <= MAX_ITEMS else [None]
    if any(part is None for part in parts):
        return None
    kind = "tensor" if any(part and part.startswith("tensor") for part in parts) else "container"
    return f"{kind} {_digest(repr(parts).encode())}"


def fingerprint(tensor: Tensor) -> str:
    """Returns a hash of the bits of this rank's shard."""
    data = local_shard(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _digest(data.numpy().tobytes())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
