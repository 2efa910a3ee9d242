"""Makes the random numbers of a training depend on its samples alone, so that trainings on
different numbers of ranks can be compared: augmentations in a data set, noise in a module."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

State = tuple[bytes, object, str]
SEED = 2**31 - 1  # torch, NumPy and Python all accept the seeds below it


def state() -> State:
    """Returns the state of the generators of torch, Python and NumPy on the host."""
    torch_state = torch.get_rng_state().numpy().tobytes()
    return torch_state, random.getstate(), repr(np.random.get_state())


def seed(number: int) -> None:
    """Sets the generators of torch, Python and NumPy."""
    torch.manual_seed(number % SEED)
    random.seed(number % SEED)
    np.random.seed(number % SEED)


class SeededSamples:
    """A map-style data set whose sample i draws the same random numbers wherever it is read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "__getitems__"):  # torch would read a batch at once
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: Any) -> Any:
        kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
        seed(zlib.crc32(repr(index).encode()))
        try:
            read_many = getattr(self.dataset, "__getitems__", None)
            return read_many([index])[0] if callable(read_many) else self.dataset[index]
        finally:
            torch.set_rng_state(kept[0])
            random.setstate(kept[1])
            np.random.set_state(kept[2])


def with_seeded_samples(loaders: Any) -> bool:
    """Replaces the data sets of all loaders in a structure of them; returns whether a sample of
    one draws random numbers."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        draws = [with_seeded_samples(loader) for loader in loaders]  # all, not up to the first
        return any(draws)
    if not isinstance(loaders, DataLoader):
        inner = getattr(loaders, "iterables", None)  # of Lightning's CombinedLoader
        return inner is not None and with_seeded_samples(inner)
    dataset: Any = loaders.dataset
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if is_stream or isinstance(dataset, SeededSamples):
        return False
    vars(loaders)["dataset"] = SeededSamples(dataset)  # DataLoader refuses an assignment
    return _draws(dataset)


def _draws(dataset: Any) -> bool:
    """Returns whether reading the first sample changes a generator; restores it."""
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
    before = state()
    try:
        dataset[0]
        return state() != before
    except (LookupError, TypeError):  # its indices are no numbers from 0
        return True
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])
