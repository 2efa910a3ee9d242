"""Callback: records each training step on every rank; a killed run has a record of all its steps.

Writes lines of JSON into `rank<N>.jsonl`, each with an `event`:

    run    folder, dp_rank (data-parallel rank)
    rows   step, micro_batch, rows (a hash of each sequence), random (of the state before them)
    step   step, metrics (that the module logged), tensors (see `replica_hashes`), rates, python;
           also before the first step
    eval   step, stage (sanity_check, validate, test), metrics

Rank 0 also saves the unsharded weights as `start.pt` and `end.pt`."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from ...layout import shard_of
from ...model.any_module import metrics_of, results_of
from ...parallel import rank_view
from ...weights import gather
from . import same_draws

# Attributes that are no state of the user's: Lightning's and this library's own.
NO_STATE = set(vars(L.LightningModule())) | set(vars(Callback()))
NO_STATE |= {"eval_metrics", "metrics", "metric_buffer", "prepare_data_per_node"}
NO_STATE |= {"allow_zero_length_dataloader_with_multiple_devices"}
NO_STATE |= {"_external_params"}  # ZeRO-3 notes what else a module reads


class Recorder(Callback):
    """Records into `folder`, without changing the training; `run` is the run folder.
    log_every_n_steps should be 1."""

    def __init__(self, folder: Path, rank: int, run: Path) -> None:
        self.folder = folder
        self.run = run
        self._recorded_step = -1
        self._file = (folder / f"rank{rank}.jsonl").open("a", encoding="utf-8", buffering=1)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        rank = rank_view(trainer.strategy).data_rank.rank
        self._write("run", folder=str(self.run), dp_rank=rank)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save_weights("start", pl_module)
        self._write_step(trainer, pl_module, {})

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: object, batch: object, batch_idx: int
    ) -> None:
        rows = [fingerprint(sample) for sample in samples_in(batch)]
        state, step = _digest(same_draws.state()), trainer.global_step + 1
        self._write("rows", step=step, micro_batch=batch_idx, rows=rows, random=state)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object, **__: object
    ) -> None:
        if trainer.global_step != self._recorded_step:
            self._write_step(trainer, pl_module, metrics_of(pl_module).latest)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = results_of(trainer, pl_module)
        self._write("eval", step=trainer.global_step, stage=trainer.state.stage, metrics=metrics)

    on_test_end = on_validation_end

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save_weights("end", pl_module)

    def _write_step(
        self, trainer: L.Trainer, module: L.LightningModule, metrics: Mapping[str, float]
    ) -> None:
        self._recorded_step = trainer.global_step
        rates: list[float] = []  # of the next step
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                rates.append(float(group["lr"]))
        self._write(
            "step",
            step=trainer.global_step,
            metrics=metrics,
            tensors=replica_hashes([*module.named_parameters(), *module.named_buffers()]),
            rates=rates,
            python=python_state(trainer, module),
        )

    def _save_weights(self, name: str, module: nn.Module) -> None:
        weights = gather(module)  # collective; {} on other ranks than 0
        if weights:
            torch.save(weights, self.folder / f"{name}.pt")

    def _write(self, event: str, **values: object) -> None:
        self._file.write(json.dumps({"event": event, **values}) + "\n")


def samples_in(batch: Any) -> Tensor:
    """Returns the tensor whose rows are the samples: of text its tokens, else the first tensor; of
    a batch without one, a hash of what it prints."""
    tensor = _first_tensor(batch)
    if tensor is None:
        digest = hashlib.blake2b(repr(batch).encode(), digest_size=7).digest()  # fits an int64
        return torch.tensor([int.from_bytes(digest)])
    if tensor.dim() == 0:
        return tensor.reshape(1)
    return tensor


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        tokens = batch.get("unsharded_input_ids", batch.get("input_ids"))
        if tokens is not None:
            return _first_tensor(tokens)
        batch = list(batch.values())
    if not isinstance(batch, list | tuple):
        return None
    for part in batch:
        tensor = _first_tensor(part)
        if tensor is not None:
            return tensor
    return None


def replica_hashes(tensors: Iterable[tuple[str, Tensor | None]]) -> dict[str, tuple[str, str]]:
    """Returns {name: (shard, hash)} of this rank's tensors. Ranks with the same shard of a tensor
    must have the same hash. `shard` is "" for an unsharded tensor, and its coordinate for a sharded
    one. ZeRO-3's partitions are skipped: no two ranks hold the same."""
    hashes: dict[str, tuple[str, str]] = {}
    for name, tensor in tensors:
        if tensor is None:
            continue
        place = shard_of(tensor).place
        if place is not None:
            hashes[name] = (place, fingerprint(tensor))
    return hashes


def python_state(trainer: L.Trainer, module: nn.Module) -> dict[str, str]:
    """Returns {"NAME.attribute": text or hash} of numbers, tensors and dictionaries of them that
    the module, its submodules and the user's callbacks have as attributes, without parameters,
    buffers and Lightning's attributes."""
    owners: list[tuple[str, object]] = list(module.named_modules())
    library = __name__.split(".")[0]
    for callback in trainer.callbacks:  # ty: ignore[missing-attribute]
        if not type(callback).__module__.startswith((f"{library}.", "lightning.")):
            owners.append((type(callback).__name__, callback))
    state: dict[str, str] = {}
    for name, owner in owners:
        for key in sorted(vars(owner).keys() - NO_STATE):
            value = vars(owner)[key]
            if isinstance(value, nn.Module):  # an attribute that is not a submodule, as an average
                value = value.state_dict()
            if not isinstance(value, dict):
                value = {"": value}
            for part, item in value.items():
                where = f"{name}.{key}.{part}".strip(".")
                if isinstance(item, Tensor) and not item.is_meta:
                    state[where] = f"tensor {fingerprint(item)}"
                elif isinstance(item, int | float):
                    state[where] = repr(item)
    return state


def fingerprint(tensor: Tensor) -> str:
    """Returns a hash of the bits of this rank's shard."""
    data = shard_of(tensor).values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _digest(data.numpy().tobytes())


def _digest(value: object) -> str:
    data = value if isinstance(value, bytes) else repr(value).encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()
