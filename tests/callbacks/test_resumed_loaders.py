"""A resumed run reads the batches, and draws the augmentations, of an uninterrupted one: loaders of
any kind, with and without worker processes."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from dist_template.callbacks import RandomState, SampleOrder
from tests.support.quiet import QUIET, OfLoader
from tests.support.tiers import tiers

NUM = 14  # rows: seven batches of an epoch


def noise() -> list[float]:
    return [torch.rand(1).item(), random.random(), float(np.random.rand())]


@pytest.fixture(autouse=True)
def own_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`seed_everything` writes a variable that the tests after these would read."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")


class Noisy(Dataset):
    """Draws from three generators when a row is read."""

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, *noise()])


class Fetched(Noisy):
    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        return [self[row] for row in rows]


class Stream(IterableDataset):
    """Shuffles by the global generator, and draws when a row is read."""

    def __init__(self, count: int = NUM) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(self.count).tolist()
        return (torch.tensor([row, *noise()]) for row in order)


class Endless(Stream):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield from super().__iter__()


def collate(rows: list[Tensor]) -> Tensor:
    return default_collate(rows) + torch.tensor([0, *noise()])


class Buckets(Sampler[list[int]]):
    """Batches of one and of three rows, in an order that `set_epoch` decides."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        rows = np.random.default_rng(self.epoch).permutation(NUM).tolist()
        while len(rows) > 1:
            size = min(len(rows), 1 + 2 * random.randrange(2))
            yield [rows.pop() for _ in range(size)]


class Forever(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield random.randrange(NUM)


class Owned(Sampler[int]):
    """Draws from a generator of its own, which nothing seeds anew."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw.permutation(NUM).tolist())

    def __len__(self) -> int:
        return NUM


class OwnLoader:
    """No DataLoader."""

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(6):
            yield torch.tensor([[random.randrange(NUM), *noise()]])


class OwnIterator:
    """Is its own iterator."""

    def __iter__(self) -> "OwnIterator":
        self.count = 0
        return self

    def __next__(self) -> Tensor:
        self.count += 1
        if self.count > 6:
            raise StopIteration
        return torch.tensor([[self.count, *noise()]])


class Prefetching(DataLoader):
    """A subclass that changes its batches."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch + torch.rand(1)


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: DataLoader(Noisy(), 2, shuffle=True, collate_fn=collate),
    "seeded": lambda: DataLoader(Noisy(), 2, shuffle=True, generator=own_generator()),
    "fetched": lambda: DataLoader(Fetched(), 2),
    "workers": lambda: DataLoader(Noisy(), 2, num_workers=2, collate_fn=collate),
    "persistent": lambda: DataLoader(
        Noisy(), 2, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "single rows": lambda: DataLoader(Noisy(), None, shuffle=True),
    "weighted": lambda: DataLoader(Noisy(), 2, sampler=WeightedRandomSampler([1.0] * NUM, 12)),
    "replacement": lambda: DataLoader(Noisy(), 2, sampler=RandomSampler(Noisy(), True, NUM)),
    "subset": lambda: DataLoader(Noisy(), 2, sampler=SubsetRandomSampler(range(11))),
    "own generator": lambda: DataLoader(
        Noisy(), 2, sampler=SubsetRandomSampler(range(NUM), own_generator())
    ),
    "owned": lambda: DataLoader(Noisy(), 2, sampler=Owned()),
    "forever": lambda: DataLoader(Noisy(), 2, sampler=Forever()),
    "buckets": lambda: DataLoader(Noisy(), batch_sampler=Buckets()),
    "stream": lambda: DataLoader(Stream(), 2, collate_fn=collate),
    "stream with workers": lambda: DataLoader(Stream(), 2, num_workers=2),
    "endless": lambda: DataLoader(Endless(), 2),
    "subclass": lambda: Prefetching(Noisy(), 2, shuffle=True),
    "no DataLoader": OwnLoader,
    "its own iterator": OwnIterator,
    "processes by spawn": lambda: DataLoader(
        Noisy(), 2, num_workers=1, multiprocessing_context="spawn", persistent_workers=True
    ),
    "dict": lambda: {
        "a": DataLoader(Noisy(), 2, shuffle=True),
        "b": [DataLoader(Stream(3), 1), DataLoader(Noisy(), 3, shuffle=True)],
    },
    "sized": lambda: [DataLoader(Noisy(), 2), DataLoader(Noisy(), 5, sampler=Owned())],
    "cycles": lambda: [DataLoader(Noisy(), 2), DataLoader(Stream(2), 1), DataLoader(Stream(1))],
    "longest": lambda: CombinedLoader([DataLoader(Noisy(), 2), OwnLoader()], "max_size"),
    "shortest": lambda: CombinedLoader(
        [DataLoader(Noisy(), 2), DataLoader(Stream(9), 2)], "min_size"
    ),
}


class Module(L.LightningModule):
    def __init__(self, stop: int, folder: Path) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.stop, self.folder, self.seen = stop, folder, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(numbers(batch))
        first = torch.tensor(self.seen[-1][:4])
        return self.net(first / NUM).square().mean()

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        if len(self.seen) == self.stop:
            self.trainer.save_checkpoint(self.folder / "last.ckpt")
            self.stop = -1
            raise KeyboardInterrupt

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def numbers(batch: Any) -> list[float]:
    if batch is None:  # of a loader that has ended before the others
        return []
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return sum(map(numbers, batch), [])
    return batch.flatten().tolist()


class OfMaker(OfLoader):
    """Returns a new loader at each call."""

    def train_dataloader(self) -> Any:
        return self.loader()


def fit(
    folder: Path, loader: Any, stop: int = 0, is_made_again: bool = False, **options: Any
) -> Module:
    L.seed_everything(1)
    module = Module(stop, folder)
    given: Any = {"max_epochs": 3, "max_steps": 18} | options
    trainer = L.Trainer(callbacks=[RandomState(), SampleOrder()], **given, **QUIET)
    data = OfMaker(loader) if is_made_again else OfLoader(loader)
    checkpoint = None if stop else folder / "last.ckpt"
    try:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    except SystemExit:  # of KeyboardInterrupt
        pass
    return module


DAILY = ["plain", "workers", "weighted", "buckets", "stream", "cycles", "subclass"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiers(LOADERS, daily=DAILY))
def test_a_resumed_run_reads_and_draws_as_an_uninterrupted_one(tmp_path: Path, kind: str) -> None:
    create = LOADERS[kind]
    expected = fit(tmp_path, create(), stop=-1)
    assert len(expected.seen) > 10
    for stop in (3, 7, 10):
        assert fit(tmp_path, create(), stop).seen == expected.seen[:stop]
        resumed = fit(tmp_path, create())
        assert resumed.seen == expected.seen[stop:], f"stopped at {stop}"
        for name, weight in expected.state_dict().items():
            assert torch.equal(weight, resumed.state_dict()[name])


KINDS = ("own generator", "owned", "weighted", "dict", "cycles", "stream")
ASKED_AGAIN = list(itertools.product(KINDS, (1, 2), (False, True)))
DAILY_AGAIN = [("own generator", 1, False), ("own generator", 1, True), ("dict", 1, False)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "every", "is_made_again"), tiers(ASKED_AGAIN, DAILY_AGAIN))
def test_loaders_that_are_asked_for_again_resume_as_well(
    tmp_path: Path, kind: str, every: int, is_made_again: bool
) -> None:
    """A loader that is returned again goes on with its generator, and a new one starts anew."""
    create = LOADERS[kind]
    options = {"reload_dataloaders_every_n_epochs": every, "is_made_again": is_made_again}

    def given() -> Any:
        return create if is_made_again else create()

    expected = fit(tmp_path, given(), stop=-1, **options)
    for stop in (3, 7, 10, 15):
        assert fit(tmp_path, given(), stop, **options).seen == expected.seen[:stop]
        resumed = fit(tmp_path, given(), **options)
        assert resumed.seen == expected.seen[stop:], f"stopped at {stop}"
