"""An exact order of samples for plain DataLoaders, on any number of ranks and after a resume.

1  `setup` wraps `train_dataloader`, `val_dataloader` and `test_dataloader` of the module or the
   data module, so that Lightning gets other loaders from them.
2  A plain training loader gets a `GlobalOrder` as its sampler (`_in_order`); any_loader.py
   distributes every other one, and those of evaluations.
3  The position in the order is in each checkpoint, with what the order depends on; a resume that
   would continue in another order is refused.
4  `teardown` removes the wrappers."""

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from .. import processes
from ..checkpoint.identity import OF_AN_ORDER, compare
from ..compat.epochs import make_resumable
from ..compat.lightning import batch_progress, batches_of_epoch, in_sequence, mode_of
from ..errors import InputError
from ..model.any_module import callbacks_of, data_of, owns_order
from ..parallel import rank_view
from ..project import has_command_line
from .any_loader import (
    Position,
    Ranks,
    check_lengths,
    distributed,
    flattened,
    generators_of_all,
    in_order,
    length,
)
from .checkpoint import LastCheckpoint
from .global_order import ConsumedSamples, GlobalOrder

NEXT = (
    "each rank would train on all of them. Return a DataLoader; or let each rank's read rows of its"
    " own, by trainer.global_rank and trainer.world_size, and give"
    " --trainer.use_distributed_sampler false, which says so"
)


class SampleOrder(Callback):
    """Makes the order of plain DataLoaders a function of a seed and a position.

    Training takes the next `batch_size` x ranks x `trainer.accumulate_grad_batches` samples in each
    optimizer step, shuffled anew for each epoch if the loader shuffles: the same samples on any
    number of ranks, and the next ones after a resume. Samples that fill no step at an epoch's end
    come first in the next epoch. Validation and test are distributed over the ranks. If the dataset
    has `costs`, a number per sample, ranks get equal work in each step, of equally many samples.

    A loader with an iterable dataset, with a sampler of its own, or of another class keeps its
    order, as one does that the Trainer reloads, which may have other rows in each epoch. It is
    distributed over the ranks by any_loader.py; so are all loaders where `distributes`
    is false, and there each rank must skip the other ranks' samples itself. A datamodule with an
    order of its own is not changed.

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
        self._create: Any = None  # the wrapped train_dataloader
        self._generators: list[Any] | None = None  # of the present loaders; None: there are none
        self._come_again = False  # reloaded loaders have the generators of those before
        self._passes: dict[int, int] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer: Any = trainer
        if owns_order(data_of(trainer)):
            return
        make_resumable(trainer)
        self._rank, self._num_ranks = rank_view(trainer.strategy).data_rank
        if stage == "fit":
            self._consumed, self._loaded, self._settings = None, {}, {}
            self._generators, self._come_again, self._passes = None, False, {}
            # The Trainer has set its limits by it, and would replace samplers by sequential ones:
            # each rank would have the same rows, and a resumed run the first ones.
            self._overfits = self._trainer.overfit_batches
            self._trainer.overfit_batches = 0.0
            if has_command_line() and isinstance(getattr(trainer, "val_check_interval", None), int):
                # The command line counts optimizer steps, Lightning batches.
                trainer.val_check_interval *= trainer.accumulate_grad_batches
        owner: Any = data_of(trainer) or pl_module
        kind = L.LightningDataModule if data_of(trainer) else L.LightningModule
        orders = {"train": self._train, "val": self._evaluation, "test": self._evaluation}
        for stage_name, order in orders.items():
            name = f"{stage_name}_dataloader"
            if is_overridden(name, owner, kind) and name not in vars(owner):
                create = getattr(owner, name)
                if stage_name == "train":
                    self._create = create
                setattr(owner, name, _ordered(create, order))
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
        if isinstance(loader, CombinedLoader) and mode_of(loader) == "sequential":
            raise InputError(
                'train_dataloader returns a CombinedLoader of mode "sequential", which Lightning'
                " has for evaluation alone: use min_size, max_size or max_size_cycle, or"
                " concatenate the datasets"
            )
        is_plain = self.distributes and _is_plain(loader, RandomSampler, SequentialSampler)
        if self._trainer.reload_dataloaders_every_n_epochs:  # rows may differ in each epoch
            is_plain = False
        if self._trainer.world_size > 1 and dist.is_initialized():
            self._check_ranks(loader, is_plain)
        if is_plain:
            return self._in_order(loader)
        self._note_generators(loader)
        if not self.distributes:  # each rank has rows of its own already
            return distributed(loader, Ranks(0, 1, _refuse), self._position(torch.initial_seed()))
        ranks = Ranks(self._rank, self._num_ranks, _refuse)
        return distributed(loader, ranks, self._position(_global_seed()))

    def _note_generators(self, loader: Any) -> None:
        """Finds whether `train_dataloader`, called again by reload_dataloaders_every_n_epochs,
        returns samplers with the generators of those before, which continue, or new ones. A resumed
        run cannot know that, and calls it twice."""
        found, known = generators_of_all(loader), self._generators
        if known is not None:
            if not _are_same(found, known):
                self._passes = {}
        elif found and self._trainer.ckpt_path:
            if self._trainer.reload_dataloaders_every_n_epochs:
                known = generators_of_all(self._create())
        if known is not None:
            self._come_again = _are_same(found, known)
        self._generators = found

    def _check_ranks(self, loader: Any, is_plain: bool) -> None:
        """Refuses ranks with different numbers of rows or batches. Collective."""
        lengths: list[int | None] = [length(each) for each in flattened(loader)]
        if is_plain:
            lengths = [len(loader.dataset)]
        check_lengths(processes.from_all_ranks(lengths))

    def _in_order(self, loader: Any) -> Any:
        accumulation = self._trainer.accumulate_grad_batches
        per_batch = loader.batch_size * self._num_ranks
        self.global_batch_size = per_batch * accumulation
        num = len(loader.dataset)
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
        # Lightning's advice is for other loaders: this one resumes.
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
        costs = getattr(loader.dataset, "costs", None)
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
        at = self._position(_global_seed(), skips=False)
        return in_order(loader, _Resumable(loader.dataset, order), drop_last=True, at=at)

    def _position(self, seed: int, skips: bool = True) -> Position:
        """Where an epoch begins. `skips`: the loader starts with the epoch's first batch."""
        trainer = self._trainer

        def epochs() -> int:
            every = trainer.reload_dataloaders_every_n_epochs
            if every and not self._come_again:
                return trainer.current_epoch % every
            return trainer.current_epoch

        return Position(
            seed,
            self._rank,
            epoch=lambda: trainer.current_epoch,
            skipped=lambda: batches_of_epoch(trainer) if skips else 0,
            total=lambda: batch_progress(trainer).total.ready,
            epochs=epochs,
            num_batches=lambda: trainer.num_training_batches,
            announces=trainer.world_size > 1 and dist.is_initialized(),
            passes=self._passes,
        )

    def _rows_per_epoch(self, num: int, per_batch: int) -> int:
        """Returns the rows of an epoch that trainer.limit_train_batches shortens; 0 for others."""
        limit = self._trainer.limit_train_batches
        batches = num // per_batch
        if isinstance(limit, float):
            limit = int(batches * limit)
        if not 0 < limit < batches:
            return 0
        return limit * per_batch

    def _compare(self) -> None:
        """Refuses an order that differs from the checkpoint's, once both are known."""
        accepted: list[str] = []
        for callback in callbacks_of(self._trainer):
            if isinstance(callback, LastCheckpoint):
                accepted += OF_AN_ORDER.intersection(callback.accept_changes)
        before = {key: self._loaded[key] for key in self._settings if key in self._loaded}
        compare(self._trainer.ckpt_path, before, self._settings, accepted)

    def _evaluation(self, loader: Any) -> Any:
        """Distributes each row to one rank. Ranks call collectives in each batch, so that they need
        equally many."""
        if self._overfits:
            loader = in_sequence(loader)
        if self._num_ranks == 1:
            return loader
        if not self.distributes:
            return loader
        for each in flattened(loader):
            self._warn_of_double_rows(each)
        ranks = Ranks(self._rank, self._num_ranks, self._evaluates_all, pads=True)
        return distributed(loader, ranks, Position(_global_seed(), self._rank))

    def _warn_of_double_rows(self, loader: Any) -> None:
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return
        is_own = type(loader.batch_sampler) not in (BatchSampler, type(None))
        if is_own:
            count, what = length(loader.batch_sampler), "batches"
        else:
            count, what = length(loader.sampler), "rows"
        if count is None:
            return
        double = -count % self._num_ranks
        if double and (is_own or not loader.drop_last):
            rank_zero_warn(
                f"{double} of {count} {what} of an evaluation count twice, so that"
                f" {self._num_ranks} ranks have equally many: evaluate a multiple of"
                f" {self._num_ranks} {what}, or on one process"
            )

    def _evaluates_all(self, loader: Any) -> Any:
        what = getattr(loader, "dataset", loader)
        rank_zero_warn(
            f"each of {self._num_ranks} ranks evaluates all rows of {type(what).__name__}, which"
            " cannot be distributed: means are right, sums and counts are"
            f" {self._num_ranks} times too large. Give an IterableDataset a method"
            " split_by_rank(rank, num_ranks), which returns the rank's part"
        )
        return loader

    # ---- the stream of samples, as PackedText has it ---------------------------------------------

    @property
    def consumed_samples(self) -> int:
        if self._consumed is None:
            return 0
        return self._consumed.value(self._trainer)

    def state_dict(self) -> dict[str, Any]:
        if self._consumed is None:
            return {}
        return self._consumed.as_state(self._trainer) | self._settings

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


def _ordered(create: Callable[[], Any], order: Callable[[Any], Any]) -> Callable[[], Any]:
    """Returns a function, no partial: Lightning compares its code with the base class's."""

    def loader() -> Any:
        return order(create())

    return loader


def _are_same(some: list[Any], others: list[Any]) -> bool:
    """Returns whether two lists have the same objects."""
    return list(map(id, some)) == list(map(id, others))


def _is_plain(loader: Any, *samplers: type) -> bool:
    """Returns whether it is torch's DataLoader with one of these samplers, over all samples."""
    if type(loader) is not DataLoader or loader.batch_size is None:
        return False
    if type(loader.sampler) not in samplers or not hasattr(loader.dataset, "__getitem__"):
        return False
    if type(loader.batch_sampler) is not BatchSampler:
        return False
    if getattr(loader.sampler, "replacement", False):
        return False
    return len(loader.sampler) == len(loader.dataset)


def _seed_of(loader: DataLoader) -> int | None:
    """Returns the seed of the shuffles, equal on all ranks; None if the loader does not shuffle."""
    if isinstance(loader.sampler, SequentialSampler):
        return None
    if loader.generator is None:
        return _global_seed()
    return loader.generator.initial_seed()


def _global_seed() -> int:
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def _refuse(loader: Any) -> Any:
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset):
        raise InputError(
            f"the training set {type(dataset).__name__} is an IterableDataset, of which each"
            " rank would read all rows: give it a method split_by_rank(rank, num_ranks), which"
            " returns the rank's part; or, if it reads a part by trainer.global_rank already,"
            " give --trainer.use_distributed_sampler false, which says so"
        )
    raise InputError(
        f"train_dataloader returns a {type(loader).__name__}, whose rows cannot be distributed"
        f" over ranks: {NEXT}"
    )
