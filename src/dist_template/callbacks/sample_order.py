"""An exact order of samples for plain DataLoaders, on any number of ranks and after a resume."""

import os
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from ..checkpoint.identity import OF_AN_ORDER, compare
from ..cluster.signals import isolate_worker
from ..compat.epochs import make_resumable
from ..compat.lightning import batch_progress, in_sequence
from ..errors import InputError
from ..model.any_module import callbacks_of, data_of, owns_order
from ..parallel import run_strategy
from ..project import has_command_line
from .any_loader import Position, distributed
from .checkpoint import LastCheckpoint
from .global_order import ConsumedSamples, GlobalOrder

KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


class SampleOrder(Callback):
    """Makes the order of plain DataLoaders a function of a seed and a position.

    Training takes the next `batch_size` x ranks x `trainer.accumulate_grad_batches` samples in each
    optimizer step, shuffled anew for each epoch if the loader shuffles: the same samples on any
    number of ranks, and the next ones after a resume. Samples that fill no step at an epoch's end
    come first in the next epoch. Validation and test are distributed over the ranks. If the dataset
    has `costs`, a number per sample, ranks get equal work in each step, of equally many samples.

    A loader with an iterable dataset, with a sampler of its own, or of another class keeps its
    order, and is distributed over the ranks by any_loader.py. A datamodule with an order of its own
    is not changed, nor are all loaders where `distributes` is false: there each rank must skip the
    other ranks' samples itself.

    Args:
        distributes: Whether loaders with an order of their own are distributed over the ranks."""

    def __init__(self, distributes: bool = True) -> None:
        self.distributes = distributes
        self._overfits: int | float = 0.0  # trainer.overfit_batches; loaders do not shuffle
        self.global_batch_size = 0  # 0: not known, or the loader is not changed
        self._consumed: ConsumedSamples | None = None
        self._loaded: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}  # what decides the order, and its seed
        self._wrapped: list[tuple[Any, str]] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer: Any = trainer
        if owns_order(data_of(trainer)):
            return
        make_resumable(trainer)
        self._rank, self._num_ranks = run_strategy(trainer.strategy).data_rank
        if stage == "fit":
            self._consumed, self._loaded, self._settings = None, {}, {}
            # The Trainer has set its limits by it, and would replace samplers by sequential ones:
            # each rank would have the same rows, and a resumed run the first ones.
            self._overfits = self._trainer.overfit_batches
            self._trainer.overfit_batches = 0.0
            if has_command_line() and isinstance(trainer.val_check_interval, int):
                # The command line counts optimizer steps, Lightning batches.
                trainer.val_check_interval *= trainer.accumulate_grad_batches
        owner: Any = data_of(trainer) or pl_module
        kind = L.LightningDataModule if data_of(trainer) else L.LightningModule
        orders = {"train": self._train, "val": self._evaluation, "test": self._evaluation}
        for stage_name, order in orders.items():
            name = f"{stage_name}_dataloader"
            if is_overridden(name, owner, kind) and name not in vars(owner):
                create = getattr(owner, name)
                setattr(owner, name, lambda create=create, order=order: order(create()))
                self._wrapped.append((owner, name))
        if stage == "fit" and (owner, "train_dataloader") not in self._wrapped:
            rank_zero_warn(
                "SampleOrder leaves a loader given to `fit` alone: return it from a"
                " train_dataloader method"
            )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for owner, name in self._wrapped:
            vars(owner).pop(name, None)
        self._wrapped = []
        if stage == "fit" and self._overfits:
            self._trainer.overfit_batches, self._overfits = self._overfits, 0.0

    def _train(self, loader: Any) -> Any:
        if self._overfits:
            loader = in_sequence(loader)
        if not self.distributes:
            return loader
        if not _is_plain(loader, RandomSampler, SequentialSampler):
            return distributed(loader, self._rank, self._num_ranks, self._position())
        accumulation = self._trainer.accumulate_grad_batches
        per_batch = loader.batch_size * self._num_ranks
        self.global_batch_size = per_batch * accumulation
        num, costs = len(loader.dataset), getattr(loader.dataset, "costs", None)
        if num < self.global_batch_size:
            raise InputError(
                f"the training set has {num} samples, and an optimizer step takes"
                f" {self.global_batch_size}: batch_size {loader.batch_size} x data_parallel"
                f" {self._num_ranks} x trainer.accumulate_grad_batches {accumulation}; lower one"
                " of them"
            )
        self._settings = {"samples": num, "seed": _seed_of(loader)}
        self._compare()
        if self._consumed is None:
            size = self.global_batch_size
            self._consumed = ConsumedSamples.attach(self._trainer, size, per_batch)
            self._consumed.load(self._loaded)
        # This one is resumable:
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
        order = GlobalOrder(
            num,
            self.global_batch_size,
            loader.batch_size,
            self._rank,
            self._num_ranks,
            self._settings["seed"],
            consumed=lambda: self.consumed_samples,
            rows_per_epoch=self._rows_per_epoch(num, per_batch),
            costs=None if costs is None else np.asarray(costs).__getitem__,
        )
        return _like(loader, _Resumable(loader.dataset, order), drop_last=True)

    def _position(self) -> Position:
        """Where an epoch of a loader with an order of its own begins."""
        return Position(
            int(os.environ.get("PL_GLOBAL_SEED", "0")),
            epoch=lambda: self._trainer.current_epoch,
            skipped=lambda: batch_progress(self._trainer).current.ready,
        )

    def _rows_per_epoch(self, num: int, per_batch: int) -> int:
        """Returns the rows of an epoch that trainer.limit_train_batches shortens; 0 for others."""
        limit = self._trainer.limit_train_batches
        batches = num // per_batch
        if isinstance(limit, float):
            limit = int(batches * limit)
        return limit * per_batch if 0 < limit < batches else 0

    def _compare(self) -> None:
        """Refuses an order that differs from the checkpoint's, once both are known."""
        last = (c for c in callbacks_of(self._trainer) if isinstance(c, LastCheckpoint))
        accepted = [key for callback in last for key in {*callback.accept_changes} & OF_AN_ORDER]
        before = {key: self._loaded[key] for key in self._settings if key in self._loaded}
        compare(self._trainer.ckpt_path, before, self._settings, accepted)

    def _evaluation(self, loader: Any) -> Any:
        if isinstance(loader, list | tuple):
            return [self._evaluation(each) for each in loader]
        if self._overfits:
            loader = in_sequence(loader)
        if self._num_ranks == 1 or not _is_plain(loader, SequentialSampler):
            return loader
        num = len(loader.dataset)
        if num % self._num_ranks and not loader.drop_last:  # ranks call collectives in each batch
            rank_zero_warn(
                f"{-num % self._num_ranks} of {num} rows of an evaluation count twice, so that"
                f" {self._num_ranks} ranks have equally many: evaluate a multiple of"
                f" {self._num_ranks} rows, or on one process"
            )
        sampler = DistributedSampler(loader.dataset, self._num_ranks, self._rank, shuffle=False)
        return _like(loader, sampler, drop_last=loader.drop_last)

    # ---- the stream of samples, as PackedText has it ---------------------------------------------

    @property
    def consumed_samples(self) -> int:
        return self._consumed.value(self._trainer) if self._consumed else 0

    def state_dict(self) -> dict[str, Any]:
        return self._consumed.as_state(self._trainer) | self._settings if self._consumed else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict
        self._compare()
        if self._consumed:
            self._consumed.load(state_dict)


class _Resumable(DistributedSampler):
    """Yields the indices of a `GlobalOrder`; Lightning does not replace a DistributedSampler."""

    def __init__(self, dataset: Any, order: GlobalOrder) -> None:
        super().__init__(dataset, order.world_size, order.rank, shuffle=False)
        self.order = order

    def __iter__(self) -> Iterator[int]:
        for batch in self.order:
            yield from batch

    def __len__(self) -> int:
        return len(self.order) * self.order.micro_batch_size


class _Deferred(DataLoader):
    """Starts reading at the first batch: Lightning loads the checkpoint after `iter`."""

    def __iter__(self) -> Iterator[Any]:  # ty: ignore[incompatible-method-override]
        yield from super().__iter__()


def _is_plain(loader: Any, *samplers: type) -> bool:
    """Returns whether it is torch's DataLoader with one of these samplers, over all samples."""
    if type(loader) is not DataLoader or loader.batch_size is None:
        return False
    if type(loader.sampler) not in samplers or not hasattr(loader.dataset, "__getitem__"):
        return False
    return len(loader.sampler) == len(loader.dataset)


def _seed_of(loader: DataLoader) -> int | None:
    """Returns the seed of the shuffles, equal on all ranks; None if the loader does not shuffle."""
    if isinstance(loader.sampler, SequentialSampler):
        return None
    generator = loader.generator
    return generator.initial_seed() if generator else int(os.environ.get("PL_GLOBAL_SEED", "0"))


def _like(loader: DataLoader, sampler: Any, drop_last: bool) -> DataLoader:
    options: dict[str, Any] = {name: getattr(loader, name) for name in KEPT}
    options["worker_init_fn"] = loader.worker_init_fn or isolate_worker
    return _Deferred(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        drop_last=drop_last,
        **options,
    )
