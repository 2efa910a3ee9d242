"""Loaders, samplers and datasets."""

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from ..arms import Habit
from .rows import EPOCHS, MEAN, NUM_TRAIN, NUM_VALIDATION, Numbers, Regression, Rows


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


class Replaced(Rows):
    def train_dataloader(self) -> Any:
        sampler = RandomSampler(self.train, replacement=True, num_samples=NUM_TRAIN)
        return DataLoader(self.train, self.batch_size, sampler=sampler)


class Shortened(Rows):
    def train_dataloader(self) -> Any:
        sampler = RandomSampler(self.train, num_samples=12)
        return DataLoader(self.train, self.batch_size, sampler=sampler)


class ByEpoch(Sampler[int]):
    """Another order in each epoch, as `set_epoch` says."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        draw = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(NUM_TRAIN, generator=draw).tolist())

    def __len__(self) -> int:
        return NUM_TRAIN


class EpochSampled(Rows):
    def train_dataloader(self) -> Any:
        return DataLoader(self.train, self.batch_size, sampler=ByEpoch())


class SplitByItsAuthor(Rows):
    """Torch's DistributedSampler, as documentation of DDP has it."""

    def train_dataloader(self) -> Any:
        num = self.trainer.world_size if self.trainer else 1
        rank = self.trainer.global_rank if self.trainer else 0
        sampler = DistributedSampler(self.train, num, rank, shuffle=True)
        return DataLoader(self.train, self.batch_size, sampler=sampler)


class Buckets(Sampler[list[int]]):
    """Batches of one to three rows, shuffled anew in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0], [1, 2], [3, 4, 5], [6], [7, 8], [9, 10, 11], [12], [13, 14]] * 2
        for number in torch.randperm(16, generator=torch.Generator().manual_seed(self.epoch)):
            yield batches[number]

    def __len__(self) -> int:
        return 16


class Bucketed(Rows):
    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_sampler=Buckets())


class Pairs(Sampler[list[int]]):
    """Batches without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        return ([row, row + 1] for row in range(0, NUM_TRAIN, 2))


class Unsized(Rows):
    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_sampler=Pairs())


class ListOfLoaders(Rows):
    def train_dataloader(self) -> Any:
        return [*DictOfLoaders.train_dataloader(self).values()]  # ty: ignore[invalid-argument-type]


class Nested(Rows):
    def train_dataloader(self) -> Any:
        one, two = ListOfLoaders.train_dataloader(self)  # ty: ignore[invalid-argument-type]
        return {"a": one, "b": (two, {"c": DataLoader(self.train, 2, shuffle=False)})}


class Shortest(Rows):
    mode = "min_size"

    def train_dataloader(self) -> Any:
        return CombinedLoader(Combined.train_dataloader(self).iterables, self.mode)  # ty: ignore


class Longest(Shortest):
    mode = "max_size"


class OneByOne(Shortest):
    mode = "sequential"


class OfSeveral(Regression):
    """Takes batches of any nesting; None where a loader has ended."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = torch.stack([self.loss_of(each) for each in batches_in(batch)]).sum()
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=2)
        return loss


def batches_in(batch: Any) -> Iterator[dict[str, Tensor]]:
    if isinstance(batch, dict) and "row" in batch:
        yield batch
    elif isinstance(batch, dict | list | tuple):
        for each in batch.values() if isinstance(batch, dict) else batch:
            yield from batches_in(each)


class SplitStream(Stream):
    """Knows how to be split."""

    rank, num_ranks = 0, 1

    def split_by_rank(self, rank: int, num_ranks: int) -> Stream:
        part = copy.copy(self)
        part.rank, part.num_ranks = rank, num_ranks
        return part

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), self.rank, None, self.num_ranks)


class SplitStreamed(Rows):
    def train_dataloader(self) -> Any:
        return DataLoader(SplitStream(self.train), self.batch_size)


class Endless(SplitStream):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from super().__iter__()


class EndlesslyStreamed(Rows):
    def train_dataloader(self) -> Any:
        return DataLoader(Endless(self.train), self.batch_size)


class SelfSplit(Stream):
    """Skips the rows of other ranks itself, and of other workers."""

    def __iter__(self) -> Iterator[Any]:
        rank, num = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return islice(super().__iter__(), rank, None, num)


class SelfSplitStreamed(Rows):
    def train_dataloader(self) -> Any:
        return DataLoader(SelfSplit(self.train), self.batch_size)


def hugging_face(rows: Numbers) -> Any:
    import datasets

    items = [rows[number] for number in range(len(rows))]
    columns = {name: [item[name].tolist() for item in items] for name in items[0]}
    return datasets.Dataset.from_dict(columns).with_format("torch")


class HuggingFace(Rows):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.train = hugging_face(self.train)


class HuggingFaceStream(Rows):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.train = hugging_face(self.train).to_iterable_dataset()


class Options(Rows):
    """Keywords of a DataLoader that decide no order."""

    def train_dataloader(self) -> Any:
        return DataLoader(
            self.train,
            self.batch_size,
            num_workers=1,
            persistent_workers=True,
            prefetch_factor=3,
            drop_last=True,
            collate_fn=default_collate,
        )


class ValidatesOnSeveral(Regression):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)


class SeveralValidations(Rows):
    def val_dataloader(self) -> Any:
        halves = Subset(self.held_out, range(4)), Subset(self.held_out, range(4, 8))
        return [DataLoader(halves[0], 2), DataLoader(halves[1], 1, sampler=Backwards(4))]


class ValidationSampled(Rows):
    def val_dataloader(self) -> Any:
        return DataLoader(self.held_out, 2, sampler=Backwards(NUM_VALIDATION))


class ValidationStreamed(Rows):
    """Each rank of Lightning's reads all; its mean is the same."""

    def val_dataloader(self) -> Any:
        return DataLoader(Stream(self.held_out), 2)


# Parts of the sentences that refuse a loader.
UNEQUAL = {"several": "is an IterableDataset, of which each rank would read all rows"}
SEQUENTIAL = 'a CombinedLoader of mode "sequential", which Lightning has for evaluation alone'
SEVERAL = ("ddp", "fsdp2", "zero2", "ddp3")
ALL_ROWS = "Lightning 2.6.6 trains every rank on all rows of an IterableDataset"
NO_SAMPLER = "inject a (distributed) sampler into your batch sampler"

HABITS: dict[str, Habit] = {
    "shuffled": Habit(data="Shuffled", trainer=EPOCHS, rows_differ=True),
    "own_loader": Habit(data="OwnLoaders", trainer=EPOCHS),
    "weighted": Habit(data="Weighted", trainer=EPOCHS, rows_differ=True),
    "replaced": Habit(data="Replaced", trainer=EPOCHS, rows_differ=True),
    "shortened": Habit(
        data="Shortened",
        trainer=EPOCHS,
        why="on several ranks Lightning 2.6.6 takes every row of the set, and forgets the sampler's"
        " num_samples",
        differs=SEVERAL,
        rows_differ=True,
    ),
    "subset_sampled": Habit(data="SubsetSampled", trainer=EPOCHS, rows_differ=True),
    "own_sampler": Habit(data="OwnSampler", trainer=EPOCHS),
    "epoch_sampled": Habit(data="EpochSampled", trainer=EPOCHS),
    "split_by_its_author": Habit(data="SplitByItsAuthor", trainer=EPOCHS),
    "batch_sampled": Habit(
        data="BatchSampled",
        trainer=EPOCHS,
        why="on several ranks Lightning 2.6.6 takes torch's BatchSampler as the loader's own, and"
        " makes batches of one row; here a batch has as many as its author says",
        differs=SEVERAL,
    ),
    "bucketed": Habit(
        data="Bucketed",
        trainer=EPOCHS,
        why="Lightning 2.6.6 calls `set_epoch` of samplers alone (issue 13316), so that each epoch"
        " has the batches of the first",
        differs=("one",),
        impossible=NO_SAMPLER,
    ),
    "unsized": Habit(data="Unsized", trainer=EPOCHS, impossible=NO_SAMPLER),
    "dict_of_loaders": Habit("OfTwo", "DictOfLoaders", EPOCHS),
    "list_of_loaders": Habit("OfSeveral", "ListOfLoaders", EPOCHS),
    "nested": Habit("OfSeveral", "Nested", EPOCHS),
    "combined": Habit("OfTwo", "Combined", EPOCHS),
    "shortest": Habit("OfTwo", "Shortest", EPOCHS),
    "longest": Habit("OfSeveral", "Longest", EPOCHS),
    "one_by_one": Habit(
        "OfTwo", "OneByOne", EPOCHS, refused={"one": SEQUENTIAL, "several": SEQUENTIAL}
    ),
    "streamed": Habit(data="Streamed", trainer=EPOCHS, refused=UNEQUAL),
    "streamed_with_length": Habit(data="StreamedWithLength", trainer=EPOCHS, refused=UNEQUAL),
    "split_stream": Habit(data="SplitStreamed", trainer=EPOCHS, why=ALL_ROWS, differs=SEVERAL),
    "self_split": Habit(
        data="SelfSplitStreamed", trainer=EPOCHS | {"use_distributed_sampler": False}
    ),
    "endless": Habit(
        data="EndlesslyStreamed", trainer={"max_steps": 18}, why=ALL_ROWS, differs=SEVERAL
    ),
    "hugging_face": Habit(data="HuggingFace", trainer=EPOCHS),
    "hugging_face_stream": Habit(
        data="HuggingFaceStream", trainer=EPOCHS, why=ALL_ROWS, differs=SEVERAL
    ),
    "with_workers": Habit(data="WithWorkers", trainer=EPOCHS),
    "options": Habit(data="Options", trainer=EPOCHS),
    "reloaded": Habit(data="OwnSampler", trainer=EPOCHS | {"reload_dataloaders_every_n_epochs": 1}),
    "limited_sampler": Habit(data="OwnSampler", trainer=EPOCHS | {"limit_train_batches": 0.5}),
    "limited_stream": Habit(
        data="SelfSplitStreamed",
        trainer=EPOCHS | {"limit_train_batches": 3, "use_distributed_sampler": False},
    ),
    "uneven": Habit(
        data="Uneven",
        trainer=EPOCHS | {"accumulate_grad_batches": 2},
        why=f"{MEAN}; here rows that fill no step come first in the next epoch",
    ),
    "uneven_sampler": Habit(
        data="OwnSampler",
        trainer=EPOCHS | {"accumulate_grad_batches": 2, "limit_train_batches": 3},
        why=MEAN,
    ),
    "uneven_stream": Habit(
        data="SelfSplitStreamed",
        trainer=EPOCHS | {"accumulate_grad_batches": 5},
        flags=("--trainer.use_distributed_sampler=false",),
        why=f"{MEAN}; with ZeRO too where the loader has a length",
        differs=("one", "ddp", "fsdp2", "ddp3"),
    ),
    "randomly_augmented": Habit(data="RandomlyAugmented", trainer=EPOCHS, rows_differ=True),
    "several_validations": Habit("ValidatesOnSeveral", "SeveralValidations", EPOCHS),
    "validation_sampled": Habit(data="ValidationSampled", trainer=EPOCHS),
    "validation_streamed": Habit(data="ValidationStreamed", trainer=EPOCHS),
}
