"""Random draws while data are read: streams of their own, so that a resumed run reads a batch as an
uninterrupted run does.

Augmentations, collate functions and samplers draw from torch's, Python's and NumPy's global
generators. In the main process these draws would mix with the model's, which a checkpoint restores
at a batch that has been read already; in worker processes, each start of them would begin the draws
anew. Here, what is drawn for a batch depends on the run's seed, the rank and the batch's number
alone."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from ..cluster.signals import isolate_worker


class Draws:
    """Inside `with`, the generators of torch (CPU), Python and NumPy are a stream of its own, which
    starts from `seeds`; outside, they are unchanged. `continues`: the stream continues at the next
    `with`."""

    def __init__(self, *seeds: int, continues: bool = False) -> None:
        self.seeds, self.continues = seeds, continues
        self._inside: Any = None

    def __enter__(self) -> None:
        self._outside = _states()
        if self._inside is None:
            seed = mixed(*self.seeds)
            torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds GPUs too
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
        else:
            _restore(self._inside)

    def __exit__(self, *_: object) -> None:
        if self.continues:
            self._inside = _states()
        _restore(self._outside)


def mixed(*seeds: int) -> int:
    """Returns one seed of 63 bits; it takes a tenth of the time of NumPy's SeedSequence."""
    digest = blake2b(repr(seeds).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _states() -> Any:
    return torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)


def _restore(states: Any) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def drawn(items: Callable[[], Iterator[Any]], *seeds: int) -> Iterator[Any]:
    """Yields the items; each is computed in a stream of draws that starts from `seeds`."""
    stream, end = Draws(*seeds, continues=True), object()
    with stream:
        iterator = items()
    while True:
        with stream:
            item = next(iterator, end)
        if item is end:
            return
        yield item


@dataclass
class Task:
    """What a loader passes to the process that reads a batch: the indices, and seeds."""

    index: Any
    seeds: tuple[int, ...]


class Reader:
    """A map-style dataset together with the loader's collate function: reads a task's batch."""

    def __init__(self, loader: DataLoader) -> None:
        self.dataset: Any = loader.dataset
        self.collate: Any = loader.collate_fn
        self.is_batched = loader.batch_sampler is not None

    def __getitem__(self, task: Task) -> Any:
        with Draws(*task.seeds):
            if not self.is_batched:
                rows = self.dataset[task.index]
            elif getattr(self.dataset, "__getitems__", None):
                rows = self.dataset.__getitems__(task.index)
            else:
                rows = [self.dataset[row] for row in task.index]
            return self.collate(rows)

    __getitems__ = __getitem__  # by this name torch asks for a batch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the dataset, for a loader's class that asks for it."""
        if name.startswith("__") or "dataset" not in vars(self):  # it is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


def collated(batch: Any) -> Any:
    """The collate function of a loader whose Reader has collated the batch."""
    return batch


class WorkerStart:
    """The `worker_init_fn` of a loader's copy: calls the user's, which finds its dataset in
    `get_worker_info()`, and isolates the worker from signals to its rank."""

    def __init__(self, given: Callable[[int], Any] | None) -> None:
        self.given = given

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        if isinstance(info.dataset, Reader):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # its class is frozen
        isolate_worker(worker)
        if self.given is not None:
            self.given(worker)
