"""The order of samples does not depend on who reads; a step's counted labels are known early."""

import copy
from collections.abc import Iterator
from itertools import count, islice, repeat
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trainer_dev.data import DataModule

from dist_template import InputError
from dist_template.by_tokens import Phase
from dist_template.callbacks import global_order
from dist_template.text import PackedText
from dist_template.text.batches import loader
from dist_template.text.batches.rows import best_fit
from tests.support.runs import quiet

COUNTERS = ("ready", "started", "processed", "completed")
PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)


class Attempt(NamedTuple):
    """A job between two checkpoints: batch sizes, data-parallel ranks, and its number of steps."""

    micro: int
    ranks: int
    accumulation: int
    steps: int

    @property
    def global_batch(self) -> int:
        return self.micro * self.ranks * self.accumulation


FEW = st.integers(1, 4)
ATTEMPTS = st.lists(st.builds(Attempt, FEW, FEW, FEW, st.integers(1, 6)), min_size=1, max_size=4)


class Run:
    """A run over several attempts: counts batches as Lightning's loops, keeps a checkpoint."""

    def __init__(self, num_rows: int, seed: int | None) -> None:
        self.num_rows, self.seed = num_rows, seed
        self.rows: list[int] = []  # in the order in which they were read
        total, current = (SimpleNamespace(**dict.fromkeys(COUNTERS, 0)) for _ in range(2))
        self.saved: Any = (SimpleNamespace(total=total, current=current), {})

    def train(self, attempt: Attempt) -> None:
        progress, state = copy.deepcopy(self.saved)
        loop = SimpleNamespace(batch_progress=SimpleNamespace(total=SimpleNamespace(processed=0)))
        trainer: Any = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=loop), callbacks=[])
        sizes = (attempt.global_batch, attempt.micro * attempt.ranks)
        counter = global_order.ConsumedSamples.attach(trainer, *sizes)
        loop.batch_progress = progress  # Lightning restores its counters after `setup`
        counter.load(state)
        counter.on_train_start(trainer, SimpleNamespace())  # ty: ignore[invalid-argument-type]
        wanted = counter.value(trainer) + attempt.steps * attempt.global_batch
        while counter.value(trainer) < wanted:
            self._epoch(attempt, progress, lambda: counter.value(trainer), wanted)
        self.saved = (progress, counter.as_state(trainer))

    def _epoch(self, attempt: Attempt, progress: Any, consumed: Any, wanted: int) -> None:
        sizes, ranks = (self.num_rows, attempt.global_batch, attempt.micro), attempt.ranks
        orders = [
            global_order.GlobalOrder(*sizes, rank, ranks, self.seed, consumed=consumed)
            for rank in range(ranks)
        ]
        if progress.current.ready >= len(orders[0]):
            vars(progress.current).update(dict.fromkeys(COUNTERS, 0))
        for batches in zip(*orders, strict=True):
            if progress.current.ready >= len(orders[0]) or consumed() >= wanted:
                return
            for batch in batches:
                assert len(batch) == attempt.micro
                self.rows += batch
            for each in (progress.total, progress.current):
                for name in COUNTERS:
                    setattr(each, name, getattr(each, name) + 1)


def stream(num_rows: int, seed: int | None) -> Iterator[int]:
    """All rows, then all rows in another order, and so on."""
    for epoch in count():
        yield from global_order.permutation(num_rows, seed, epoch).tolist()


@PROPERTY
@given(st.integers(0, 40), st.none() | st.integers(0, 3), ATTEMPTS)
def test_a_run_of_any_attempts_reads_the_stream_without_a_gap(
    spare_rows: int, seed: int | None, jobs: list[Attempt]
) -> None:
    """Each attempt may have other numbers of ranks, micro-batch and global batch; over epochs."""
    run = Run(max(job.global_batch for job in jobs) + spare_rows, seed)
    for job in jobs:
        run.train(job)
    uninterrupted = stream(run.num_rows, seed)
    assert run.rows == [next(uninterrupted) for _ in run.rows]
    assert len(run.rows) == sum(job.steps * job.global_batch for job in jobs)


GROWS = [Phase(12, 0), Phase(48, 3000, "linear"), Phase(24, 4000, "cosine"), Phase(36)]


def steps_that_grow(micro: int, ranks: int, start: int, num: int) -> list[list[int]]:
    orders = []
    for rank in range(ranks):
        place: Any = {"rank": rank, "world_size": ranks, "seq_len": 10, "consumed": lambda: start}
        orders.append(global_order.GlobalOrder(50, GROWS, micro, **place))
    batches, sizes = zip(*orders, strict=False), orders[0].accumulations()
    return [sorted(sum(sum(islice(batches, next(sizes)), ()), [])) for _ in range(num)]


@pytest.mark.parametrize(("micro", "ranks"), [(1, 1), (2, 3), (3, 4), (6, 2)])
def test_batches_that_grow_have_the_same_samples_on_any_number_of_ranks(
    micro: int, ranks: int
) -> None:
    steps = steps_that_grow(12, 1, 0, 20)
    assert [len(each) for each in steps] == [*[12] * 9, *[24] * 4, *[36] * 5, 24, 36]
    assert steps_that_grow(micro, ranks, 0, 20) == steps
    resumed = steps_that_grow(micro, ranks, sum(map(len, steps[:9])), 11)
    assert resumed == steps[9:], "in the middle of a change"


@PROPERTY
@given(st.integers(2, 60), st.integers(0, 5), st.integers(0, 5), st.booleans())
def test_each_pass_has_another_order(num_rows: int, seed: int, epoch: int, many: bool) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        if not many:
            return global_order.permutation(num_rows, seed, epoch).tolist()
        halves = np.array_split(np.arange(num_rows), 2)
        parts = [global_order.scattered(half, num_rows, seed, epoch) for half in halves]
        return np.concatenate(parts).tolist()

    rows = order(seed, epoch)
    assert sorted(rows) == [*range(num_rows)]
    assert rows[-1] == num_rows - 1, "the last row, in which only a part may count, stays the last"
    if num_rows > 20:  # two of 19! orders
        assert rows not in (order(seed, epoch + 1), order(seed + 1, epoch))


@PROPERTY
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 6))
def test_evaluation_reads_every_row_once_in_equally_many_full_batches(
    rows: int, micro: int, ranks: int
) -> None:
    read = []
    for rank in range(ranks):
        batches = global_order.eval_batches({"": rows}, micro, rank, ranks)
        assert len(batches) == -(-rows // (micro * ranks))
        assert {len(batch) for batch in batches} == {micro}
        read += [row for batch in batches for row in batch]
    assert sorted(row for row in read if row != global_order.PADDING) == [*range(rows)]
    assert len(read) - rows < ranks * micro, "no more padding than it takes"


LABELS = [3, 8, 1, 2, 5]  # labels that count, in each batch of 8
CPU = torch.device("cpu")


def read(accumulation: int) -> list[dict[str, Any]]:
    labels = (torch.from_numpy(np.where(np.arange(8) < counted, 7, -100)) for counted in LABELS)
    rows = [{"labels": each} for each in labels]
    return list(loader.StepLoader(rows, lambda: repeat(accumulation), batch_size=None))


def steps(accumulation: int) -> list[loader.Counted]:
    return [batch[loader.COUNTED] for batch in read(accumulation) if loader.COUNTED in batch]


def test_the_first_batch_of_a_step_has_the_counts_of_the_step_and_the_next() -> None:
    assert [loader.COUNTED in batch for batch in read(2)] == [True, False, True, False, True]
    assert steps(2) == [
        loader.Counted((11, 2), (3, 2), True),
        loader.Counted((3, 2), (5, 2), False),
        loader.Counted((5, 2), None, False),
    ]
    assert [counted.step for counted in steps(1)] == [(labels, 1) for labels in LABELS]


def test_the_sum_starts_a_step_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has 10 labels more; sums come after a wait."""
    calls: list[str] = []

    def all_reduce(tensor: Tensor, async_op: bool) -> Any:
        assert async_op
        calls.append(f"start {tensor.item():.0f}")
        return SimpleNamespace(wait=lambda: calls.append("wait") or tensor.add_(tensor + 10))

    ranks: Any = {"is_initialized": lambda: True, "get_world_size": lambda: 2}
    monkeypatch.setattr(loader, "dist", SimpleNamespace(all_reduce=all_reduce, **ranks))
    tokens, means = loader.TokensPerMicroBatch(), []
    for counted in steps(2):
        means.append(tokens.of(counted, CPU).item())
        calls.append("step")
    assert means == [(11 + 21) / 2 / 2, (3 + 13) / 2 / 2, (5 + 15) / 2 / 2]
    assert calls[:4] == ["start 11", "wait", "start 3", "step"]
    assert calls[4:] == ["wait", "start 5", "step", "wait", "step"]


def test_memory_is_pinned_for_the_gpu_that_trains(data: DataModule, monkeypatch: Any) -> None:
    """Not for a training on CPUs beside GPUs: each rank would start CUDA on the first GPU."""
    data.prepare(report=quiet)
    data.setup("fit")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("cpu", "cuda"):
        data.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(name)))
        assert data._loader(data.rows_of("train"), [[0]], None).pin_memory == (name == "cuda")


@pytest.mark.parametrize(("median", "sigma", "seq_len"), [(250, 0.9, 2048), (60, 1.2, 1024)])
def test_rows_are_98_percent_full_and_complete(median: int, sigma: float, seq_len: int) -> None:
    """A log-normal distribution describes the lengths of published conversations well."""
    lengths = np.exp(np.random.default_rng(0).normal(np.log(median), sigma, 20_000))
    sizes = np.clip(lengths.astype(np.int64), 8, seq_len)
    rows = best_fit(sizes, seq_len)
    assert sorted(item for row in rows for item in row) == [*range(len(sizes))]
    assert max(int(sizes[row].sum()) for row in rows) <= seq_len
    assert sizes.sum() / (len(rows) * seq_len) >= 0.98


@pytest.mark.parametrize(("batch", "sentence"), [([Phase(8)], "no epochs"), (8, "multiple of 4")])
def test_an_epoch_ends_with_a_step(batch: Any, sentence: str) -> None:
    data: Any = PackedText(global_batch_size=batch, micro_batch_size=2)
    options: Any = {"max_steps": 3, "limit_train_batches": 3, "fast_dev_run": False}
    data.trainer = SimpleNamespace(**options)
    with pytest.raises(InputError, match=sentence):
        data.check(1)
