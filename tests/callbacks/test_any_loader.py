"""Loaders of any kind on several ranks: each row on one rank, equally many batches, and sentences
for what cannot be distributed."""

import statistics
from collections import namedtuple
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dist_template import InputError, Project
from dist_template.callbacks import SampleOrder
from dist_template.callbacks.any_loader import Position, Ranks, check_lengths, distributed
from dist_template.compat.loop import lighten
from tests.support.quiet import QUIET, OfLoader
from tests.support.runs import Workers

NUM, RANKS = 26, 3  # rows, which three ranks do not divide
ROWS: Any = range(NUM)
Pair = namedtuple("Pair", "one two")


class Buckets(Sampler[list[int]]):
    sizes = (3, 1, 4, 1, 5, 2, 6, 4)  # batches of a size each

    def __iter__(self) -> Iterator[list[int]]:
        rows = iter(torch.randperm(NUM).tolist())
        return (list(islice(rows, size)) for size in self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM))


class Numbers(IterableDataset):
    part = (0, 1)

    def split_by_rank(self, rank: int, num_ranks: int) -> "Numbers":
        new = Numbers()
        new.part = (rank, num_ranks)
        return new

    def __iter__(self) -> Iterator[int]:
        return iter(ROWS[self.part[0] : 24 : self.part[1]])


def refuse(loader: Any) -> Any:
    raise InputError(type(loader).__name__)


def of_ranks(loader: Any, num: int = RANKS, epoch: int = 0, pads: bool = False) -> list[Any]:
    """Returns the batches of each of several ranks."""
    found = []
    for rank in range(num):
        at = Position(7, rank, epoch=lambda: epoch)
        found.append([*distributed(loader, Ranks(rank, num, refuse, pads), at)])
    return found


def rows(batches: Any) -> list[int]:
    if isinstance(batches, Tensor):
        return batches.flatten().tolist()
    if isinstance(batches, int):
        return [batches]
    return [row for each in batches for row in rows(each)]


SAMPLERS: dict[str, Any] = {
    "own": lambda: DataLoader(ROWS, 2, sampler=[*reversed(ROWS)]),
    "subset": lambda: DataLoader(ROWS, 2, sampler=SubsetRandomSampler(ROWS)),
    "shuffled subclass": lambda: type("Own", (DataLoader,), {})(ROWS, 2, shuffle=True),
    "workers": lambda: DataLoader(ROWS, 2, sampler=[*ROWS], num_workers=2),
    "single rows": lambda: DataLoader(ROWS, None, sampler=[*ROWS]),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_each_row_is_on_one_rank_and_the_first_again_fill_up(kind: str) -> None:
    ranks = of_ranks(SAMPLERS[kind]())
    assert len({len(batches) for batches in ranks}) == 1
    found = rows(ranks)
    assert {*found} == {*ROWS} and len(found) == 27
    assert rows(of_ranks(SAMPLERS[kind]())) == found, "the same order again"


def test_draws_with_replacement_stay_draws_with_replacement() -> None:
    for sampler in (RandomSampler(ROWS, replacement=True), WeightedRandomSampler([1.0] * NUM, NUM)):
        loader = DataLoader(ROWS, 2, sampler=sampler)
        found = rows(of_ranks(loader))
        assert len(found) == 27 and len({*found}) < 24
        assert rows(of_ranks(loader, epoch=1)) != found
    few = DataLoader(ROWS, 2, sampler=RandomSampler(ROWS, num_samples=12))
    assert len({*rows(of_ranks(few))}) == 12


def test_batches_of_a_batch_sampler_stay_what_they_are() -> None:
    ranks = of_ranks(DataLoader(ROWS, batch_sampler=Buckets()))  # type: ignore[arg-type]
    sizes = [[len(batch) for batch in batches] for batches in ranks]
    assert sizes == [[3, 1], [1, 5], [4, 2]], "two batches, which fill no step, are left out"
    assert len({*rows(ranks)}) == len(rows(ranks))
    evaluated = of_ranks(DataLoader(ROWS, batch_sampler=Buckets()), pads=True)
    assert {*rows(evaluated)} == {*ROWS}
    own = BatchSampler(SequentialSampler(ROWS), 2, drop_last=False)
    assert sorted(rows(of_ranks(DataLoader(ROWS, batch_sampler=own), 2))) == [*ROWS]


def test_a_sampler_without_a_length_is_read_row_by_row() -> None:
    ranks = of_ranks(DataLoader(ROWS, 4, sampler=Unsized()))
    for rank, batches in enumerate(ranks):
        assert rows(batches) == list(range(rank, 24, RANKS))


def test_collections_keep_their_type_and_are_distributed_within() -> None:
    def loader() -> DataLoader:
        return DataLoader(ROWS, 2, sampler=[*ROWS])

    given = Pair(loader(), {"a": [loader()], "b": (DataLoader(Numbers(), 2),)})
    new = distributed(given, Ranks(1, 2, refuse), Position(0, 1))
    assert type(new) is Pair and type(new.two["b"]) is tuple
    assert rows(new.one) == rows(new.two["a"][0]) == [*range(1, NUM, 2)]
    assert rows(new.two["b"][0]) == [*range(1, 24, 2)]
    combined = CombinedLoader([loader(), loader()], "min_size")
    new = distributed(combined, Ranks(0, 2, refuse), Position(0, 0))
    assert len(iter(new)) == 7


def test_what_cannot_be_distributed_is_refused() -> None:
    class Own:
        def __iter__(self) -> Iterator[int]:
            return iter(ROWS)

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(ROWS)

    for loader in (Own(), {"a": [Own()]}, DataLoader(Stream()), CombinedLoader([Own()])):
        with pytest.raises(InputError):
            of_ranks(loader)
        assert of_ranks(loader, num=1)


def test_ranks_with_different_lengths_are_refused() -> None:
    check_lengths([[4, None], [4, None]])
    sentence = "different numbers of training batches, 4 on rank 0 and 3 on rank 1: they take steps"
    with pytest.raises(InputError, match=sentence):
        check_lengths([[4, 2], [3, 2]])


# ---- the last step of an epoch -------------------------------------------------------------------


class Slope(L.LightningModule):
    """Its gradient is the mean of a step's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.gradients: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * batch.float()).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.weight.grad is not None
        self.gradients.append(self.weight.grad.item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


@pytest.mark.parametrize("loop", ["Lightning's", "the command line's"])
@pytest.mark.parametrize(
    ("loader", "limit"),
    [
        (DataLoader(Numbers(), 2), 8),
        (DataLoader(type("Sized", (Numbers,), {"__len__": lambda _: 24})(), 3), 1.0),
        (DataLoader(Numbers(), 3), 1.0),
        (DataLoader(ROWS, 3, sampler=[*range(24)]), 1.0),
        (DataLoader(ROWS, 3), 5),
    ],
)
def test_the_last_step_of_an_epoch_has_the_mean_gradient_of_its_batches(
    loader: DataLoader, limit: float, loop: str
) -> None:
    module = Slope()
    trainer = L.Trainer(
        max_epochs=2,
        accumulate_grad_batches=3,
        limit_train_batches=limit,
        callbacks=[SampleOrder()],
        **QUIET,
    )
    if loop != "Lightning's":
        lighten(trainer)
    trainer.fit(module, datamodule=OfLoader(loader))
    size = loader.batch_size or 1
    num_used = 24
    if limit > 1:  # a number of batches
        num_used = min(24, int(limit) * size)
    means = []
    for start in range(0, num_used, 3 * size):
        end = min(start + 3 * size, num_used)
        means.append(statistics.mean(range(start, end)))
    assert module.gradients == pytest.approx(2 * means), "in both epochs"
    assert trainer.accumulate_grad_batches == 3


# ---- ranks whose data end at different places ----------------------------------------------------


class Uneven(Numbers):
    """Of 25 rows, rank 0 has 13."""

    def split_by_rank(self, rank: int, num_ranks: int) -> "Numbers":
        new = Uneven()
        new.part = (rank, num_ranks)
        return new

    def __iter__(self) -> Iterator[int]:
        return iter(range(25)[self.part[0] :: self.part[1]])


class UnevenData(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(Uneven(), 4)


class UnevenLengths(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return DataLoader(range(20 + 4 * self.trainer.global_rank), 4)  # ty: ignore[invalid-argument-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "flags", "sentence"),
    [
        (
            "UnevenData",
            "",
            "the training data of rank 1 ended after 3 batches of epoch 0, and rank 0 has more:",
        ),
        (
            "UnevenLengths",
            "--trainer.use_distributed_sampler=false",
            "ranks have different numbers of training batches, 5 on rank 0 and 6 on rank 1:",
        ),
    ],
)
def test_a_rank_whose_data_end_early_is_named(
    tmp_path: Path, data: str, flags: str, sentence: str
) -> None:
    project = Project("tests.callbacks", f"{__name__}:Slope", f"{__name__}:{data}")
    given = f"""fit --run.root={tmp_path / "runs"} --run.report=false --trainer.accelerator=cpu
        --trainer.devices=2 --trainer.max_epochs=2 {flags}"""
    record = Workers(2, project).run(given.split(), tmp_path / "ranks")
    assert sentence in record.refusal, record.error
    assert "trainer.limit_train_batches to" in record.refusal
