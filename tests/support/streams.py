"""The classifier's images as streams, and evaluations of any size."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from dist_template import Project
from tests.support.classifier import Images


class Stream(IterableDataset):
    """The same samples on every rank, or each rank's own, or one batch again and again."""

    def __init__(self, rows: TensorDataset, kind: str) -> None:
        self.rows = rows
        self.kind = kind

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        every = (self.rows[i % 2 if self.kind == "constant" else i] for i in range(len(self.rows)))
        if self.kind == "sharded":
            return islice(every, dist.get_rank(), None, dist.get_world_size())
        return every


class Streams(Images):
    """`kind`: a Stream's; or "sampler": a sampler of its own, whose seed is the same on all
    ranks."""

    def __init__(
        self, batch_size: int = 2, num_train: int = 96, kind: str = "same", num_held_out: int = 64
    ) -> None:
        super().__init__(batch_size, num_train)
        self.kind = kind
        self.num_held_out = num_held_out

    def train_dataloader(self) -> DataLoader:
        if self.kind == "sampler":
            sampler = RandomSampler(self.train, replacement=True, num_samples=64)
            return DataLoader(self.train, self.batch_size, sampler=sampler)
        return DataLoader(Stream(self.train, self.kind), self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(
            TensorDataset(*(each[: self.num_held_out] for each in self.held_out.tensors)), 4
        )

    def test_dataloader(self) -> Any:
        return self.val_dataloader()


STREAMS = Project("tests.support", ".classifier:PlainClassifier", ".streams:Streams")
