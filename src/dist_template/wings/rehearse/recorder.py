"""Callback: records each training step on every rank; a killed run has a record of all its steps.

Writes lines of JSON into `rank<N>.jsonl`, each with an `event`:

    run         folder, dp_rank (data-parallel rank)
    rows        step, rows (a hash of each sequence), random (of the random state before them)
    gradients   tensors (see `replica_hashes`): gradients of the first step, before clipping
    step        step, metrics (that the module logged), tensors (see `replica_hashes`), buffers
                (their names), optimizer, rates, python; also before the first step
    eval        step, stage (sanity, validate, test), metrics

Rank 0 also saves the unsharded weights as `start.pt` and `end.pt`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.optim import Optimizer

from ...layout import local_shard, shard_place
from ...model.any_module import metrics_of, results_of
from ...parallel import run_strategy
from ...weights import gather

NO_STATE = set(vars(L.LightningModule())) | set(vars(Callback()))
NO_STATE |= {"eval_metrics", "metrics", "metric_buffer", "prepare_data_per_node"}
NO_STATE |= {"allow_zero_length_dataloader_with_multiple_devices"}
NO_STATE |= {"_external_params"}  # ZeRO-3 notes what else a module reads
MAX_ITEMS = 1000  # a larger container is data, not state


class Recorder(Callback):
    """Records into `folder`, without changing the training; `run` is the run folder.

    log_every_n_steps should be 1, for the metrics.
    """

    def __init__(self, folder: Path, rank: int, run: Path) -> None:
        self.folder = folder
        self.run = run
        self._recorded_step = -1
        self._has_gradients = False
        self._file = (folder / f"rank{rank}.jsonl").open("a", encoding="utf-8", buffering=1)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        rank = run_strategy(trainer.strategy).data_rank.rank
        self._write("run", folder=str(self.run), dp_rank=rank)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save_weights("start", pl_module)
        self._write_step(trainer, pl_module, {})

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        rows = [*map(fingerprint, samples_in(batch))]
        state = fingerprint(torch.get_rng_state())
        self._write("rows", step=trainer.global_step + 1, micro_batch=batch_idx, rows=rows, random=state)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if not self._has_gradients:
            self._has_gradients = True
            gradients = ((name, each.grad) for name, each in pl_module.named_parameters())
            self._write("gradients", tensors=replica_hashes(gradients))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object, **__: object) -> None:
        if trainer.global_step != self._recorded_step:
            self._write_step(trainer, pl_module, metrics_of(pl_module).latest)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stage = "sanity" if trainer.sanity_checking else "validate"
        if trainer.testing:
            stage = "test"
        metrics = results_of(trainer, pl_module)
        self._write("eval", step=trainer.global_step, stage=stage, metrics=metrics)

    on_test_end = on_validation_end

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save_weights("end", pl_module)

    def _write_step(self, trainer: L.Trainer, module: L.LightningModule, metrics: Mapping[str, float]) -> None:
        self._recorded_step = trainer.global_step
        buffers = dict(module.named_buffers())
        rates: list[float] = []  # of the next step
        for optimizer in trainer.optimizers:
            rates += [float(group["lr"]) for group in optimizer.param_groups]
        self._write(
            "step",
            step=trainer.global_step,
            metrics=metrics,
            tensors=replica_hashes([*module.named_parameters(), *buffers.items()]),
            buffers=[*buffers],
            optimizer=optimizer_state(trainer, module),
            rates=rates,
            python=python_state(trainer, module),
        )

    def _save_weights(self, name: str, module: nn.Module) -> None:
        if weights := gather(module):  # collective; {} on other ranks than 0
            torch.save(weights, self.folder / f"{name}.pt")

    def _write(self, event: str, **values: object) -> None:
        self._file.write(json.dumps({"event": event, **values}) + "\n")


# ---- batches ---------------------------------------------------------------------------------


def samples_in(batch: Any) -> Tensor:
    """Returns the tensor whose rows are the samples: of text its tokens, else the first tensor."""
    if isinstance(batch, Mapping):
        first = next(iter(batch.values()))
        return samples_in(batch.get("whole_input_ids", batch.get("input_ids", first)))
    return samples_in(batch[0]) if isinstance(batch, list | tuple) else batch


def labels_in(batch: object) -> Tensor | tuple:
    """Returns the tensor whose rows are the samples' labels: `labels`, or the second of a tuple; an
    empty tuple if the batch has no labels, or if ranks share sequences and have parts of them."""
    found = None
    if isinstance(batch, Mapping) and "whole_input_ids" not in batch:
        found = batch.get("labels")
    elif isinstance(batch, list | tuple) and len(batch) > 1:
        found = batch[1]
    return found if isinstance(found, Tensor) and found.ndim else ()


# ---- state -----------------------------------------------------------------------------------


def replica_hashes(tensors: Iterable[tuple[str, Tensor | None]]) -> dict[str, tuple[str, str]]:
    """Returns {name: (shard, hash)} of this rank's tensors.

    Ranks with the same shard of a tensor must have the same hash. `shard` is "" for an unsharded tensor, and its
    coordinate for a sharded one. ZeRO-3's partitions are skipped: no two ranks hold the same.
    """
    found: dict[str, tuple[str, str]] = {}
    for name, tensor in tensors:
        if tensor is not None and (place := shard_place(tensor)) is not None:
            found[name] = (place, fingerprint(tensor))
    return found


def optimizer_state(trainer: L.Trainer, module: nn.Module) -> dict[str, str]:
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


def python_state(trainer: L.Trainer, module: nn.Module) -> dict[str, str]:
    """Returns {"NAME.attribute": hash} of plain values, tensors, generators and their containers.

    These are attributes of the module, all its submodules and the user's callbacks, without
    parameters and buffers (checkpoints have them) and without Lightning's attributes.
    """
    owners: list[tuple[str, object]] = [*module.named_modules()]
    library = __name__.split(".")[0]
    for callback in trainer.callbacks:  # ty: ignore[missing-attribute]
        if not type(callback).__module__.startswith((f"{library}.", "lightning.")):
            owners.append((type(callback).__name__, callback))
    found: dict[str, str] = {}
    for name, owner in owners:
        for key, value in vars(owner).items():
            hashed = _hash(value) if key not in NO_STATE else None
            if hashed is not None:
                found[f"{name}.{key}".lstrip(".")] = hashed
    return found


def _hash(value: object) -> str | None:
    """Returns a hash, which starts with "tensor" if the value holds one; None for other objects."""
    if isinstance(value, Tensor):
        return None if value.is_meta else f"tensor {fingerprint(value)}"
    if isinstance(value, torch.Generator):
        return f"generator {fingerprint(value.get_state())}"
    if isinstance(value, random.Random):
        return f"generator {_digest(value.getstate())}"
    if isinstance(value, np.random.Generator):
        return f"generator {_digest(value.bit_generator.state)}"
    if isinstance(value, np.ndarray):
        return f"array {_digest(value.tobytes())}"
    if isinstance(value, nn.Module):  # in a container or a callback; checkpoints have the module's
        value = value.state_dict()
    if isinstance(value, Mapping):
        value = [*value.items()]
    if isinstance(value, list | tuple | deque):
        parts = [_hash(item) for item in value] if len(value) <= MAX_ITEMS else [None]
        if None in parts:
            return None
        kind = "tensor" if any(part and part.startswith("tensor") for part in parts) else "items"
        return f"{kind} {_digest(parts)}"
    is_plain = isinstance(value, bool | int | float | str | None | np.generic)
    return repr(value) if is_plain else None


def fingerprint(tensor: Tensor) -> str:
    """Returns a hash of the bits of this rank's shard."""
    data = local_shard(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _digest(data.numpy().tobytes())


def _digest(value: object) -> str:
    data = value if isinstance(value, bytes) else repr(value).encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()
