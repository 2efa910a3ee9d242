"""Loaders that are not torch's plain one over a map-style set: each rank gets rows of its own, and
a resumed epoch goes on with the next batch.

SampleOrder has an order of its own for plain loaders. For others the order stays the loader's:

    a sampler, also in a loader's subclass    rank r of n gets its indices r, r + n, r + 2n, …
    a batch sampler                           rank r gets its batches r, r + n, r + 2n, …
    an iterable dataset                       `split_by_rank(rank, num_ranks)` of the dataset, or
                                              datasets' own split; refused without
    dicts, lists, CombinedLoader              each loader in them

Samplers draw from generators that are seeded by the run's seed and the epoch, equally on all ranks,
as DistributedSampler's shuffle does: what one rank leaves out, another one has."""

import copy
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from ..errors import InputError


class Position:
    """Where an epoch begins for a loader: its number, and the batches that are trained on already.

    Attributes:
        seed: The run's.
        epoch: Returns the number of the present epoch.
        skipped: Returns the batches of it that a resumed run has trained on."""

    def __init__(self, seed: int, epoch: Callable[[], int], skipped: Callable[[], int]) -> None:
        self.seed, self.epoch, self.skipped = seed, epoch, skipped


def distributed(loader: Any, rank: int, num_ranks: int, at: Position) -> Any:
    """Returns the loader, or a collection of them, for one of several ranks. Raises InputError if
    its rows cannot be distributed."""
    if isinstance(loader, CombinedLoader):
        return CombinedLoader(distributed(loader.iterables, rank, num_ranks, at), loader._mode)
    if isinstance(loader, dict):
        return {name: distributed(one, rank, num_ranks, at) for name, one in loader.items()}
    if isinstance(loader, list | tuple):
        return type(loader)(distributed(one, rank, num_ranks, at) for one in loader)
    if hasattr(loader, "load_state_dict"):  # it resumes itself, as torchdata's StatefulDataLoader
        return loader if num_ranks == 1 else _refuse(loader)
    if not isinstance(loader, DataLoader):
        return loader if num_ranks == 1 else _refuse(loader)
    if isinstance(loader.dataset, IterableDataset):
        return _of_a_stream(loader, rank, num_ranks, at)
    is_split = isinstance(loader.sampler, DistributedSampler)  # by its author
    ranks = (0, 1) if is_split else (rank, num_ranks)
    new = _copied(loader, at)
    if loader.batch_sampler is None:
        vars(new)["sampler"] = Part(loader.sampler, *ranks, at)
    elif type(loader.batch_sampler) is BatchSampler:
        indices = Part(loader.sampler, *ranks, at)
        size, drop_last = loader.batch_sampler.batch_size, loader.batch_sampler.drop_last
        vars(new)["sampler"] = indices
        vars(new)["batch_sampler"] = Rest(BatchSampler(indices, size, drop_last), at)
        indices.skips = False
    else:
        vars(new)["batch_sampler"] = Part(loader.batch_sampler, *ranks, at, pads=False)
    return new


def _refuse(loader: Any) -> Any:
    raise InputError(
        f"train_dataloader returns a {type(loader).__name__}, whose rows cannot be distributed over"
        " ranks: each rank would train on all of them. Return a DataLoader; or let each rank's read"
        " rows of its own, by trainer.global_rank and trainer.world_size, and give"
        " --trainer.use_distributed_sampler false, which says so"
    )


def _of_a_stream(loader: DataLoader, rank: int, num_ranks: int, at: Position) -> Any:
    dataset: Any = loader.dataset
    if num_ranks > 1:
        if hasattr(dataset, "split_by_rank"):
            dataset = dataset.split_by_rank(rank, num_ranks)
        elif type(dataset).__module__.partition(".")[0] == "datasets":
            from datasets.distributed import split_dataset_by_node

            dataset = split_dataset_by_node(dataset, rank, num_ranks)
        else:
            raise InputError(
                f"the training set {type(dataset).__name__} is an IterableDataset, of which each"
                " rank would read all rows: give it a method split_by_rank(rank, num_ranks), which"
                " returns the rank's part; or, if it reads a part by trainer.global_rank already,"
                " give --trainer.use_distributed_sampler false, which says so"
            )
    new = _copied(loader, at, skips=True)
    vars(new)["dataset"] = dataset
    return new


def _copied(loader: DataLoader, at: Position, skips: bool = False) -> Any:
    """Returns a copy of the loader whose samplers can be set. It starts reading at its first batch,
    because Lightning loads the checkpoint after `iter`; with `skips`, it drops the batches that a
    resumed run has trained on."""
    kind = type(loader)

    def read(self: Any) -> Iterator[Any]:
        batches = kind.__iter__(self)
        yield from islice(batches, at.skipped() if skips else 0, None)

    new = copy.copy(loader)
    members = {"__iter__": read, "__module__": kind.__module__, "__doc__": kind.__doc__}
    new.__class__ = type(kind.__name__, (kind,), members)
    return new


class Part(DistributedSampler):
    """A rank's part of what a sampler, or a batch sampler, yields; Lightning does not replace a
    DistributedSampler. Ranks have equally many: with `pads` the first entries again, as torch's
    DistributedSampler has it, else without the last ones."""

    skips = True  # what a resumed run has trained on

    def __init__(
        self, inner: Any, rank: int, num_ranks: int, at: Position, pads: bool = True
    ) -> None:
        super().__init__(inner, num_ranks, rank, shuffle=False, drop_last=not pads)
        self.inner, self.at = inner, at

    def __iter__(self) -> Iterator[Any]:
        skipped = self.at.skipped() if self.skips else 0
        with _drawing(self.at.seed, self.at.epoch()):
            entries = list(self.inner)
        total = len(self) * self.num_replicas
        entries = (entries + entries[: total - len(entries)])[:total]
        yield from entries[self.rank : total : self.num_replicas][skipped:]

    def __len__(self) -> int:
        count = len(self.inner)
        return count // self.num_replicas if self.drop_last else -(-count // self.num_replicas)


class Rest(BatchSampler):
    """The batches of a batch sampler that a resumed run has not trained on."""

    def __init__(self, inner: BatchSampler, at: Position) -> None:
        super().__init__(inner.sampler, inner.batch_size, inner.drop_last)
        self.at = at

    def __iter__(self) -> Iterator[list[int]]:
        return islice(super().__iter__(), self.at.skipped(), None)


class _drawing:  # noqa: N801  (read as a statement)
    """Inside, all generators start from the seed and the epoch; afterwards they go on as before."""

    def __init__(self, seed: int, epoch: int) -> None:
        self.seeds = [seed, epoch]

    def __enter__(self) -> None:
        self._states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        (seed,) = np.random.SeedSequence(self.seeds).generate_state(1)
        torch.manual_seed(int(seed))
        random.seed(int(seed))
        np.random.seed(int(seed))

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._states[0])
        random.setstate(self._states[1])
        np.random.set_state(self._states[2])
