"""An exact order of samples for plain DataLoaders: over any number of ranks, and after a stop at any step."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import lightning as L
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from ..cluster.signals import isolate_worker
from ..compat.loop import make_fit_resumable
from ..errors import InputError
from ..model.any_module import owns_order
from ..project import has_command_line
from ..text.order import ConsumedSamples, GlobalOrder, Jump

KEPT = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "multiprocessing_context", "generator", "prefetch_factor",
    "persistent_workers",
)  # fmt: skip


class SampleOrder(Callback):
    """Gives the plain DataLoaders of a datamodule or module an order that follows from a seed and a position.

    Training takes the next `batch_size` x ranks x `trainer.accumulate_grad_batches` samples in each optimizer step,
    shuffled anew for each epoch where the loader shuffles: the same samples on any number of ranks, and the next ones
    after a resume. What fills no step at an epoch's end comes first in the next epoch. Validation and test are
    distributed over the ranks.

    A loader with an iterable dataset, with a sampler of its own, or of another class (torchdata's StatefulDataLoader,
    whose state Lightning saves itself) stays as it is; datamodules with an order of their own are left alone.
    """

    def __init__(self) -> None:
        self.global_batch_size = 0  # 0: not known, or a loader that stays as it is
        self._consumed: ConsumedSamples | None = None
        self._loaded: dict[str, Any] = {}
        self._wrapped: list[tuple[Any, str]] = []

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer = trainer
        if owns_order(trainer.datamodule):
            return
        make_fit_resumable(trainer)
        dealt = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        self._rank, self._num_ranks = dealt["rank"], dealt["num_replicas"]
        if stage == "fit":
            self._consumed = None
            if has_command_line() and isinstance(trainer.val_check_interval, int):  # optimizer steps, as of PackedText
                trainer.val_check_interval *= trainer.accumulate_grad_batches
        owner: Any = trainer.datamodule or pl_module
        kind = L.LightningDataModule if trainer.datamodule else L.LightningModule
        for name, order in {"train": self._train, "val": self._evaluation, "test": self._evaluation}.items():
            name += "_dataloader"
            if is_overridden(name, owner, kind) and name not in vars(owner):
                setattr(owner, name, _then(getattr(owner, name), order))
                self._wrapped.append((owner, name))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for owner, name in self._wrapped:
            vars(owner).pop(name, None)
        self._wrapped = []

    def _train(self, loader: Any) -> Any:
        if not _is_plain(loader, RandomSampler, SequentialSampler) or self._trainer.overfit_batches:
            if not hasattr(loader, "load_state_dict") and not self._trainer.overfit_batches:
                rank_zero_warn(
                    f"{type(loader).__name__}: its order is its own; a resumed epoch starts again at its first batch"
                )
            return loader
        per_batch = loader.batch_size * self._num_ranks
        self.global_batch_size = per_batch * self._trainer.accumulate_grad_batches
        num = len(loader.dataset)
        if num < self.global_batch_size:
            raise InputError(
                f"the training set has {num} samples, and an optimizer step takes {self.global_batch_size}: batch_size"
                f" {loader.batch_size} x data_parallel {self._num_ranks} x trainer.accumulate_grad_batches"
                f" {self._trainer.accumulate_grad_batches}; lower one of them"
            )
        if self._consumed is None:
            self._consumed = ConsumedSamples.attach(self._trainer, self.global_batch_size, per_batch)
            self._consumed.load(self._loaded)
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")  # this one is
        order = GlobalOrder(
            num, self.global_batch_size, loader.batch_size, self._rank, self._num_ranks, _seed_of(loader),
            consumed=lambda: self.consumed_samples, jumps=lambda: self.jumps,
        )  # fmt: skip
        return _like(loader, _Resumable(loader.dataset, order), drop_last=True)

    def _evaluation(self, loader: Any) -> Any:
        if isinstance(loader, list | tuple):
            return [self._evaluation(each) for each in loader]
        if self._num_ranks == 1 or not _is_plain(loader, SequentialSampler):
            return loader
        sampler = DistributedSampler(loader.dataset, self._num_ranks, self._rank, shuffle=False)
        return _like(loader, sampler, drop_last=loader.drop_last)

    # ---- the stream of samples, as PackedText has it ------------------------------------------------------------

    @property
    def consumed_samples(self) -> int:
        return self._consumed.value(self._trainer) if self._consumed else 0

    @property
    def jumps(self) -> list[Jump]:
        return self._consumed.jumps if self._consumed else []

    def jump(self, intervals: list[Jump]) -> None:
        if self._consumed:
            self._consumed.jump(intervals, self._trainer)

    def state_dict(self) -> dict[str, Any]:
        return self._consumed.as_state(self._trainer) if self._consumed else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict
        if self._consumed:
            self._consumed.load(state_dict)


class _Resumable(DistributedSampler):
    """The indices of a `GlobalOrder`, one by one; Lightning leaves a DistributedSampler where it is."""

    def __init__(self, dataset: Any, order: GlobalOrder) -> None:
        super().__init__(dataset, order.world_size, order.rank, shuffle=False)
        self.order = order

    def __iter__(self) -> Iterator[int]:
        for batch in self.order:
            yield from batch

    def __len__(self) -> int:
        return len(self.order) * self.order.micro_batch_size


class _Deferred(DataLoader):
    """Starts reading when the first batch is wanted: Lightning makes the iterator before it loads the checkpoint."""

    def __iter__(self) -> Iterator[Any]:  # ty: ignore[incompatible-method-override]
        yield from super().__iter__()


def _is_plain(loader: Any, *samplers: type) -> bool:
    """Returns whether torch's own DataLoader reads each sample of a map-style dataset once, in one of these orders."""
    if type(loader) is not DataLoader or loader.batch_size is None or type(loader.sampler) not in samplers:
        return False
    return hasattr(loader.dataset, "__getitem__") and len(loader.sampler) == len(loader.dataset)


def _seed_of(loader: DataLoader) -> int | None:
    """Returns the seed of the shuffles, equal on all ranks; None for a loader that does not shuffle."""
    if isinstance(loader.sampler, SequentialSampler):
        return None
    generator = loader.generator
    return generator.initial_seed() if generator else int(os.environ.get("PL_GLOBAL_SEED", "0"))


def _like(loader: DataLoader, sampler: Any, drop_last: bool) -> DataLoader:
    options: dict[str, Any] = {name: getattr(loader, name) for name in KEPT}
    options["worker_init_fn"] = loader.worker_init_fn or isolate_worker
    options |= {"batch_size": loader.batch_size, "sampler": sampler, "drop_last": drop_last}
    return _Deferred(loader.dataset, **options)


def _then(make: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    @wraps(make)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(make(*args, **kwargs))

    return changed
