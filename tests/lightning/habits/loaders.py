"""Loaders, samplers and datasets."""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..arms import Habit
from .rows import EPOCHS, NUM_TRAIN, Numbers, Regression, Rows


class Shuffled(Rows):
    def train_dataloader(self) -> Any:
        return DataLoader(self.train, self.batch_size, shuffle=True)


class OwnLoader(DataLoader):
    """A subclass that adds nothing."""


class OwnLoaders(Rows):
    def train_dataloader(self) -> Any:
        return OwnLoader(self.train, self.batch_size)


class Weighted(Rows):
    def train_dataloader(self) -> Any:
        weights = torch.arange(1.0, NUM_TRAIN + 1)
        sampler = WeightedRandomSampler(weights.tolist(), NUM_TRAIN)
        return DataLoader(self.train, self.batch_size, sampler=sampler)


class SubsetSampled(Rows):
    def train_dataloader(self) -> Any:
        sampler = SubsetRandomSampler(range(16))
        return DataLoader(self.train, self.batch_size, sampler=sampler)


class Backwards(Sampler[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count - 1, -1, -1))

    def __len__(self) -> int:
        return self.count


class OwnSampler(Rows):
    def train_dataloader(self) -> Any:
        return DataLoader(self.train, self.batch_size, sampler=Backwards(NUM_TRAIN))


class BatchSampled(Rows):
    def train_dataloader(self) -> Any:
        batches = BatchSampler(SequentialSampler(self.train), self.batch_size, drop_last=True)
        return DataLoader(self.train, batch_sampler=batches)


class DictOfLoaders(Rows):
    def train_dataloader(self) -> Any:
        halves = Subset(self.train, range(12)), Subset(self.train, range(12, 24))
        return {name: DataLoader(half, 2) for name, half in zip("ab", halves, strict=True)}


class Combined(Rows):
    def train_dataloader(self) -> Any:
        halves = Subset(self.train, range(12)), Subset(self.train, range(12, 20))
        loaders = {name: DataLoader(half, 2) for name, half in zip("ab", halves, strict=True)}
        return CombinedLoader(loaders, "max_size_cycle")


class OfTwo(Regression):
    """Takes a dict of batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = sum(self.loss_of(each) for each in batch.values())
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class Stream(IterableDataset):
    """All rows, whoever asks."""

    def __init__(self, rows: Numbers) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[number] for number in range(len(self.rows)))


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.rows)


class Streamed(Rows):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(self.train), self.batch_size)


class StreamedWithLength(Rows):
    def train_dataloader(self) -> Any:
        return DataLoader(SizedStream(self.train), self.batch_size)


class WithWorkers(Rows):
    def train_dataloader(self) -> Any:
        return DataLoader(self.train, self.batch_size, num_workers=2)


class Uneven(Rows):
    """13 batches of two, and one row: the last window of two batches is short."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.train = Numbers(26)


class Augmented(Numbers):
    """Adds noise by torch's generator when a row is read."""

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        item = super().__getitem__(row)
        return item | {"x": item["x"] + 0.1 * torch.randn(4)}


class RandomlyAugmented(Rows):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.train = Augmented(NUM_TRAIN)


# A part of the sentence that refuses a loader.
UNEQUAL = "is an IterableDataset, of which each rank would read all rows"

HABITS: dict[str, Habit] = {
    "shuffled": Habit(data="Shuffled", trainer=EPOCHS, rows_differ=True),
    "own_loader": Habit(data="OwnLoaders", trainer=EPOCHS),
    "weighted": Habit(data="Weighted", trainer=EPOCHS, rows_differ=True),
    "subset_sampled": Habit(data="SubsetSampled", trainer=EPOCHS, rows_differ=True),
    "own_sampler": Habit(data="OwnSampler", trainer=EPOCHS),
    "batch_sampled": Habit(
        data="BatchSampled",
        trainer=EPOCHS,
        why="on several ranks Lightning 2.6.6 takes torch's BatchSampler as the loader's own, and"
        " makes batches of one row; here a batch stays a batch",
    ),
    "dict_of_loaders": Habit("OfTwo", "DictOfLoaders", EPOCHS),
    "combined": Habit("OfTwo", "Combined", EPOCHS),
    "streamed": Habit(data="Streamed", trainer=EPOCHS, refused={"several": UNEQUAL}),
    "streamed_with_length": Habit(
        data="StreamedWithLength", trainer=EPOCHS, refused={"several": UNEQUAL}
    ),
    "with_workers": Habit(data="WithWorkers", trainer=EPOCHS),
    "uneven": Habit(data="Uneven", trainer=EPOCHS | {"accumulate_grad_batches": 2}),
    "randomly_augmented": Habit(data="RandomlyAugmented", trainer=EPOCHS, rows_differ=True),
}
