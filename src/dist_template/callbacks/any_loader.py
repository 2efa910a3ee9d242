"""Loaders of any kind on any number of ranks: each rank gets rows of its own, and a resumed epoch
continues with the next batch.

SampleOrder has an order of its own for plain loaders. For others the order stays the loader's:

    a sampler, also in a loader's subclass    rank r of n gets its indices r, r + n, r + 2n, …
    a batch sampler                           rank r gets its batches r, r + n, r + 2n, …
    an iterable dataset                       `split_by_rank(rank, num_ranks)` of the dataset, or
                                              datasets' own split; refused without
    dicts, lists, CombinedLoader              each loader in them

Samplers draw from generators that are seeded by the run's seed and the epoch, equally on all ranks,
as DistributedSampler's shuffle does: what one rank leaves out, another one has. A map-style dataset
draws by the run's seed, the rank and the batch's number (draws.py)."""

import copy
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from itertools import chain, count, cycle, islice
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from ..compat.lightning import mode_of
from ..compat.torch import default_store
from ..errors import InputError
from .draws import Draws, Reader, Task, WorkerStart, collated, drawn, mixed

POLL_S = 0.02  # between two looks at how far the other ranks' streams are
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class Position:
    """Where an epoch begins: its number, and the batches that are trained on already.

    Attributes:
        seed: The run's.
        rank: The data-parallel rank, which decides what its datasets draw.
        epoch: Returns the number of the present epoch.
        skipped: Returns the batches of it that a resumed run has trained on.
        total: Returns the batches of all epochs that have been trained on.
        epochs: Returns the epochs before the present one since the loaders were made.
        passes: For how many passes each loader's sampler has been asked in this process, by key;
            kept where a loader is made again with the same generators.
        num_batches: Returns the batches of an epoch; infinity where not known.
        announces: Whether ranks announce where a loader of unknown length ends."""

    def __init__(
        self,
        seed: int,
        rank: int,
        epoch: Callable[[], int] = lambda: 0,
        skipped: Callable[[], int] = lambda: 0,
        total: Callable[[], int] = lambda: 0,
        epochs: Callable[[], int] = lambda: 0,
        num_batches: Callable[[], float] = lambda: math.inf,
        announces: bool = False,
        passes: dict[int, int] | None = None,
    ) -> None:
        self.seed, self.rank, self.announces = seed, rank, announces
        self.epoch, self.skipped, self.total = epoch, skipped, total
        self.epochs, self.num_batches = epochs, num_batches
        self.passes = {} if passes is None else passes
        self.num_places = 0


class Place:
    """Where one loader is in an epoch. A loader that ends before others of a collection may start
    again in the same epoch: another pass, with another order.

    Attributes:
        epoch, number: Of the present pass; `number` is 0 for an epoch's first one.
        start: The first batch of the pass.
        left: Batches to skip in the next pass, where a resumed run has trained on more than one.
        has_ended: Whether the present pass has. Lightning may ask for an iterator twice, and drop
            the first: after trainer.reload_dataloaders_every_n_epochs.
        batch: The number of the next batch in the whole training.
        key: A number of the loader, equal on all ranks."""

    def __init__(self, at: Position, cycles: bool) -> None:
        self.at, self.cycles, self.key = at, cycles, at.num_places
        at.num_places += 1
        self.epoch, self.number, self.start, self.left, self.batch = -1, 0, 0, 0, 0
        self.length: int | None = None
        self.has_ended = False

    def begin(self, length: int | None) -> None:
        """Starts a pass over a loader of `length` batches; None: not known."""
        self.length = length
        is_another_pass = self.cycles and self.has_ended and self.epoch == self.at.epoch()
        self.has_ended = False
        if is_another_pass:
            self.number += 1
            self.start, self.left = self.left, 0
            return
        self.epoch, self.batch = self.at.epoch(), self.at.total()
        self.number, self.start, self.left = 0, self.at.skipped(), 0
        if self.cycles and length and self.start >= length:
            # An empty pass first: so Lightning notes that the loader has ended once.
            passes, self.left = divmod(self.start, length)
            self.number, self.start = passes - 1, length

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of a pass, equal on all ranks."""
        return (self.at.seed, self.current_epoch, self.number)

    @property
    def current_epoch(self) -> int:
        return self.at.epoch() if self.epoch < 0 else self.epoch

    @property
    def passes_before(self) -> int:
        """The passes before the present one since the loader was made."""
        per_epoch = 1
        if self.cycles and self.length:
            batches = self.at.num_batches()
            if math.isfinite(batches):
                per_epoch = math.ceil(batches / self.length)
        return self.at.epochs() * per_epoch + self.number


class Ranks:
    """Among which ranks a loader's rows are distributed.

    Attributes:
        rank, num: This one, and how many.
        pads: Whether the first rows come again where their number does not divide; else the last
            ones are left out.
        refuse: Called with a loader that cannot be distributed; raises InputError, or returns what
            is used in its place."""

    def __init__(
        self, rank: int, num: int, refuse: Callable[[Any], Any], pads: bool = False
    ) -> None:
        self.rank, self.num, self.refuse, self.pads = rank, num, refuse, pads


def distributed(loader: Any, ranks: Ranks, at: Position, cycles: bool | None = None) -> Any:
    """Returns the loader, or a collection of them, for one of several ranks. `cycles`: it starts
    again when it ends before another one; None: so does what Lightning puts into a
    CombinedLoader."""
    if cycles is None and isinstance(loader, dict | list | tuple):
        cycles = True
    if isinstance(loader, CombinedLoader):
        cycles = mode_of(loader) == "max_size_cycle"
        return CombinedLoader(distributed(loader.iterables, ranks, at, cycles), mode_of(loader))
    if isinstance(loader, dict):
        new: Any = copy.copy(loader)
        for name, one in loader.items():
            new[name] = distributed(one, ranks, at, cycles)
        return new
    if isinstance(loader, list | tuple):
        items = [distributed(one, ranks, at, cycles) for one in loader]
        if isinstance(loader, tuple) and type(loader) is not tuple:  # a NamedTuple
            return type(loader)(*items)
        return type(loader)(items)
    is_split = isinstance(getattr(loader, "sampler", None), DistributedSampler)  # by its author
    if hasattr(loader, "load_state_dict"):  # it resumes itself, as torchdata's StatefulDataLoader
        if ranks.num == 1 or is_split:
            return loader
        return ranks.refuse(loader)
    place = Place(at, bool(cycles))
    if not isinstance(loader, DataLoader):
        if ranks.num == 1:
            return _resumable(loader, place)
        return ranks.refuse(loader)
    if isinstance(loader.dataset, IterableDataset):
        return _of_a_stream(loader, ranks, place)
    if is_split:
        ranks = Ranks(0, 1, ranks.refuse)
    new = _copied(loader, _read_rows, place)
    if loader.batch_sampler is None:
        vars(new)["sampler"] = part(loader.sampler, ranks, place)
    elif type(loader.batch_sampler) is BatchSampler:
        size, drop_last = loader.batch_sampler.batch_size, loader.batch_sampler.drop_last
        vars(new)["sampler"] = part(loader.sampler, ranks, place)
        vars(new)["batch_sampler"] = BatchSampler(new.sampler, size, drop_last)
    else:
        batches = part(loader.batch_sampler, ranks, place, of_batches=True)
        vars(new)["batch_sampler"] = vars(new)["sampler"] = batches
    return new


def in_order(loader: DataLoader, sampler: Any, drop_last: bool, at: Position) -> DataLoader:
    """Returns a copy of the loader with the rows of a sampler which starts where the run is."""
    new = _copied(loader, _read_rows, Place(at, cycles=False))
    vars(new)["sampler"], vars(new)["drop_last"] = sampler, drop_last
    vars(new)["batch_sampler"] = BatchSampler(sampler, int(loader.batch_size or 1), drop_last)
    return new


def _of_a_stream(loader: DataLoader, ranks: Ranks, place: Place) -> Any:
    dataset: Any = loader.dataset
    if ranks.num > 1:
        if hasattr(dataset, "split_by_rank"):
            dataset = dataset.split_by_rank(ranks.rank, ranks.num)
        elif type(dataset).__module__.partition(".")[0] == "datasets":
            from datasets.distributed import split_dataset_by_node

            dataset = split_dataset_by_node(dataset, ranks.rank, ranks.num)
        else:
            return ranks.refuse(loader)
    new = _copied(loader, _read_stream, place)
    vars(new)["dataset"] = dataset
    return new


# ---- reading -------------------------------------------------------------------------------------


def _copied(loader: Any, read: Callable[..., Iterator[Any]], place: Place) -> Any:
    """Returns a copy of the loader, of a subclass of its class, which is iterated by `read`. It
    starts reading at its first batch, because Lightning may load the checkpoint after `iter`."""
    kind = type(loader)
    new = copy.copy(loader)
    vars(new)["dist_place"] = place
    members = {"__iter__": read, "__module__": kind.__module__, "__doc__": kind.__doc__}
    new.__class__ = type(kind.__name__, (kind,), members | {"dist_kind": kind})
    return new


def length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _read_rows(loader: Any) -> Iterator[Any]:
    """Iterates a copy of a DataLoader over a map-style dataset."""
    place = loader.dist_place
    place.begin(length(loader))
    if "dist_reader" not in vars(loader):  # kept: it has the persistent workers
        reader = copy.copy(loader)
        reader.__class__ = loader.dist_kind
        vars(reader).update(
            dataset=Reader(loader),
            collate_fn=collated,
            generator=torch.Generator(),  # of the workers' seeds
            worker_init_fn=WorkerStart(loader.worker_init_fn),
        )
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        vars(reader)[name] = _Tasks(getattr(loader, name), place)
        vars(loader)["dist_reader"] = reader
    loader.dist_reader.generator.manual_seed(mixed(*place.seeds, place.at.rank))
    batches = loader.dist_kind.__iter__(loader.dist_reader)
    if loader.dist_kind.__iter__ is not DataLoader.__iter__:
        batches = _drawn_for_each(batches, place)
    yield from announced(batches, place) if _announces(place, loader) else batches
    place.has_ended = True


def _drawn_for_each(batches: Iterator[Any], place: Place) -> Iterator[Any]:
    """Yields what a subclass makes of the batches; it may draw too."""
    end = object()
    for number in count(place.batch):
        with Draws(place.at.seed, place.at.rank, number, 1):
            batch = next(batches, end)
        if batch is end:
            return
        yield batch


class _Tasks(Sampler[Task]):
    """The batches of a pass from its first one on, with their seeds."""

    def __init__(self, inner: Any, place: Place) -> None:
        self.inner, self.place = inner, place

    def __iter__(self) -> Iterator[Task]:
        place = self.place
        batch, seed, rank = place.batch, place.at.seed, place.at.rank
        for index in islice(iter(self.inner), place.start, None):
            place.batch = batch = batch + 1
            yield Task(index, (seed, rank, batch))

    def __len__(self) -> int:
        return len(self.inner)


def _read_stream(loader: Any) -> Iterator[Any]:
    """Iterates a copy of a DataLoader over an iterable dataset, or another iterable: a resumed run
    reads again what it has trained on."""
    place = loader.dist_place
    place.begin(length(loader))
    batches = _rest_of_a_stream(loader, place)
    yield from announced(batches, place) if _announces(place, loader) else batches
    place.has_ended = True


def _announces(place: Place, loader: Any) -> bool:
    """Whether ranks may have different numbers of batches, which are not known before. A loader
    that starts again does not end an epoch."""
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    return place.at.announces and not place.cycles and (is_stream or length(loader) is None)


def _rest_of_a_stream(loader: Any, place: Place) -> Iterator[Any]:
    set_epoch = getattr(getattr(loader, "dataset", None), "set_epoch", None)
    if callable(set_epoch):  # Hugging Face's shuffle anew
        set_epoch(place.epoch)
    while True:
        number = 0

        def batches() -> Iterator[Any]:
            return loader.dist_kind.__iter__(loader)

        if getattr(loader, "num_workers", 0):  # they draw; here, only their seed is drawn
            with Draws(*place.seeds):
                items = batches()
        else:
            items = drawn(batches, *place.seeds)
        for number, batch in enumerate(items, 1):
            if number > place.start:
                yield batch
        has_skipped_all = 0 < number <= place.start
        if not place.cycles or not has_skipped_all:
            return
        if place.number == 0:  # an empty pass, as in `begin`
            place.left = place.start - number
            return
        place.number, place.start = place.number + 1, place.start - number


def _resumable(loader: Any, place: Place) -> Any:
    """Returns a copy of a loader of another class, which skips what a resumed run has trained on;
    the loader itself where its class is not Python's."""
    if not isinstance(getattr(type(loader), "__iter__", None), FunctionType):
        return loader
    try:
        return _copied(loader, _read_stream, place)
    except TypeError:  # slots, or a class that cannot be copied
        return loader


# ---- samplers ------------------------------------------------------------------------------------


class Part(DistributedSampler):
    """A rank's part of what a sampler, or a batch sampler, yields; Lightning does not replace a
    DistributedSampler. Ranks have equally many: the first entries again, as torch's
    DistributedSampler has it, or, of batches in training, without the last ones."""

    def __init__(self, inner: Any, ranks: Ranks, place: Place, of_batches: bool = False) -> None:
        drop_last = of_batches and not ranks.pads
        rows: Any = range(ranks.num)  # torch asks for a length, which `inner` may not have
        super().__init__(rows, ranks.num, ranks.rank, shuffle=False, drop_last=drop_last)
        self.inner, self.place = inner, place

    def __iter__(self) -> Iterator[Any]:
        entries = self._entries()
        total = len(self) * self.num_replicas
        if total > len(entries):  # the first ones come again
            entries += list(islice(cycle(entries), total - len(entries)))
        yield from entries[self.rank : total : self.num_replicas]

    def _entries(self) -> list[Any]:
        self.set_epoch(self.place.current_epoch)
        count = len(self.inner)
        if generators_of(self.inner):
            # Its generator has to be where the passes before have left it: draw as often.
            passes, key = self.place.at.passes, self.place.key
            for _ in range(passes.get(key, 0), self.place.passes_before):
                for _ in islice(self.inner, count):
                    pass
            passes[key] = max(passes.get(key, 0), self.place.passes_before) + 1
        with Draws(*self.place.seeds):
            return list(islice(self.inner, count))

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        for sampler in (self.inner, getattr(self.inner, "sampler", None)):
            own = getattr(sampler, "set_epoch", None)
            if callable(own):
                own(epoch)

    def __len__(self) -> int:
        count = len(self.inner)
        if self.drop_last:
            return count // self.num_replicas
        return (count + self.num_replicas - 1) // self.num_replicas  # rounded up


class UnsizedPart(Part):
    """Of a sampler without a length, which may have no end: what fills no step of all ranks is left
    out."""

    def __iter__(self) -> Iterator[Any]:
        self.set_epoch(self.place.current_epoch)
        entries = drawn(lambda: iter(self.inner), *self.place.seeds)
        while True:
            of_all_ranks = list(islice(entries, self.num_replicas))
            if len(of_all_ranks) < self.num_replicas:
                return
            yield of_all_ranks[self.rank]

    def __len__(self) -> int:
        raise TypeError(f"{type(self.inner).__name__} has no length")


def part(inner: Any, ranks: Ranks, place: Place, of_batches: bool = False) -> Part:
    kind = UnsizedPart if length(inner) is None else Part
    return kind(inner, ranks, place, of_batches)


def generators_of(sampler: Any) -> list[Any]:
    """Returns the generators that a sampler, or one inside it, draws from and keeps."""
    if hasattr(sampler, "set_epoch") or not hasattr(sampler, "__dict__"):
        return []
    found = []
    for one in vars(sampler).values():
        if isinstance(one, GENERATORS):
            found.append(one)
        elif isinstance(one, Sampler):
            found += generators_of(one)
    return found


def generators_of_all(loader: Any) -> list[Any]:
    """Returns the generators of the samplers of a loader, or a collection of them."""
    found = []
    for each in flattened(loader):
        batches = getattr(each, "batch_sampler", None)
        sampler = getattr(each, "sampler", None)
        is_plain = batches is None or type(batches) is BatchSampler
        found += generators_of(sampler if is_plain else batches)
    return found


# ---- ends ----------------------------------------------------------------------------------------


def announced(batches: Iterator[Any], place: Place) -> Iterator[Any]:
    """Yields the batches of a loader whose length is not known; ranks announce how many they have
    read. Where one rank's data end before another's, it raises InputError: the others would wait
    for it in a collective."""
    ranks, count = Announcements(place), 0
    for batch in batches:
        count += 1
        ranks.announce(count)
        yield batch
    ranks.announce(count, has_ended=True)
    ranks.compare(count)


class Announcements:
    """How many batches of an epoch each rank has read, in the process group's store."""

    def __init__(self, place: Place) -> None:
        self.store, self.epoch, self.loader = default_store(), place.epoch, place.key
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def announce(self, count: int, has_ended: bool = False) -> None:
        self.store.set(self._key(self.rank), json.dumps([self.epoch, count, has_ended]))

    def compare(self, count: int) -> None:
        """Waits until the other ranks' data have ended too."""
        for other in range(self.num_ranks):
            if other == self.rank:
                continue
            while not self._is_over(other, count):
                time.sleep(POLL_S)

    def _is_over(self, other: int, count: int) -> bool:
        epoch, read, has_ended = json.loads(self.store.get(self._key(other)))
        if epoch == self.epoch and read > count:
            raise InputError(
                f"the training data of rank {self.rank} ended after {count} batches of epoch"
                f" {epoch}, and rank {other} has more: ranks take steps together, so each needs"
                " equally many batches. Give ranks equally many rows, let the dataset end where the"
                f" shortest part ends, or set trainer.limit_train_batches to {count} or less"
            )
        return epoch > self.epoch or (epoch == self.epoch and has_ended and read == count)

    def _key(self, rank: int) -> str:
        return f"batches read/{self.loader}/{rank}"


def check_lengths(lengths: list[list[int | None]]) -> None:
    """Raises InputError if ranks have different numbers of batches: `lengths` of each rank's
    loaders."""
    for of_a_loader in zip(*lengths, strict=True):
        if len(set(of_a_loader)) > 1:
            least = min(0 if number is None else number for number in of_a_loader)
            raise InputError(
                f"ranks have different numbers of training batches, {_named(of_a_loader)}: they"
                " take steps together, so each needs equally many. Give ranks equally many rows, or"
                f" set trainer.limit_train_batches to {least} or less"
            )


def _named(lengths: tuple[int | None, ...]) -> str:
    first = next(rank for rank, each in enumerate(lengths) if each != lengths[0])
    return f"{lengths[0]} on rank 0 and {lengths[first]} on rank {first}"


def flattened(loader: Any) -> list[Any]:
    """Returns the loaders of a collection."""
    if isinstance(loader, CombinedLoader):
        loader = loader.iterables
    if isinstance(loader, dict):
        loader = list(loader.values())
    if isinstance(loader, list | tuple):
        return list(chain.from_iterable(map(flattened, loader)))
    return [loader]
