"""Work by load: ranks get equally expensive samples, and training has one process's numbers."""

import os
import re
import time
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_dev.module import LanguageModule

from dist_template import InputError
from dist_template.by_tokens import Phase
from dist_template.callbacks import global_order
from dist_template.callbacks.equal_work import assign, counts_of
from dist_template.callbacks.rank_speeds import MEASURED_STEPS, SKIPPED_STEPS, RankSpeeds, relative
from dist_template.checkpoint import manifest
from dist_template.text import PackedText
from dist_template.text.batches.rows import PackedRows
from dist_template.wings.history import read_run
from dist_template.wings.rehearse.record import RunRecord
from tests.support.parity import Trainings, mask_labels
from tests.support.runs import refused
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)
FOUR_ROWS = "--data.micro_batch_size=4"


@PROPERTY
@given(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_every_sample_is_assigned_once_and_ranks_differ_by_at_most_one_sample(
    accumulation: int, counts: list[int], data: st.DataObject
) -> None:
    num = accumulation * sum(counts)
    costs = data.draw(st.lists(st.floats(0, 1e6), min_size=num, max_size=num))
    assigned = assign(costs, [[count] * accumulation for count in counts], counts)
    every = [sample for rank in assigned for batch in rank for sample in batch]
    assert sorted(every) == [*range(num)]
    for batches, count in zip(assigned, counts, strict=True):
        assert [len(batch) for batch in batches] == [count] * accumulation
    if len({*counts}) == 1:
        work = [sum(costs[sample] for batch in rank for sample in batch) for rank in assigned]
        assert max(work) - min(work) <= max(costs) * (1 + 1e-9)


@PROPERTY
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9), st.integers(1, 5), st.integers(1, 9))
def test_rows_are_shared_in_proportion_to_speed_and_no_micro_batch_is_empty(
    speeds: list[float], accumulation: int, micro: int
) -> None:
    rows = accumulation * micro * len(speeds)
    counts = counts_of(rows, accumulation, speeds, len(speeds))
    assert sum(map(sum, counts)) == rows
    for of_rank, speed in zip(counts, speeds, strict=True):
        assert len(of_rank) == accumulation
        assert max(of_rank) - min(of_rank) <= 1 <= min(of_rank)
        if min(speeds) * rows / sum(speeds) >= accumulation:
            assert abs(sum(of_rank) - rows * speed / sum(speeds)) < 1


@pytest.mark.parametrize("ranks", [8, 64])
def test_the_slowest_rank_has_little_more_than_the_mean(ranks: int) -> None:
    """Lengths as of conversations: their logarithm is normal."""
    costs = np.random.default_rng(0).lognormal(6.0, 0.8, ranks * 16)
    assigned = assign(costs, [[4] * 4] * ranks, [1.0] * ranks)
    work = np.array([costs[sum(rank, [])].sum() for rank in assigned])
    in_order = costs.reshape(ranks, -1).sum(1)
    assert work.max() / work.mean() < 1.02 < 1.3 < in_order.max() / in_order.mean()


def test_a_row_costs_its_tokens_and_the_squares_of_its_documents() -> None:
    """Rows of 8 tokens with EOS 0: documents of 8; of 4 and 4; of 1 and 7."""
    tokens = np.array([[5] * 8, [5, 5, 5, 0] + [5] * 4, [0] + [5] * 7]).ravel()
    rows = PackedRows(np.append(tokens, 5), 8, 0)
    rows.attention_tokens = 100
    squares = np.array([64, 32, 50])
    assert rows.work([2, 0, 1]) == pytest.approx(8 + squares[[2, 0, 1]] / 100)
    across = PackedRows(rows.tokens, 8, 0, cross_document_attention=True)
    assert across.work([0, 1]).tolist() == [8, 8]


GROWS = [Phase(12, 0), Phase(48, 3000, "linear"), Phase(24, 4000, "cosine"), Phase(36)]


@pytest.mark.parametrize(("micro", "ranks"), [(2, 3), (3, 4), (6, 2)])
@pytest.mark.parametrize("batch", [GROWS, 36])
def test_balancing_changes_no_step_of_growing_batches_nor_after_a_resume(
    batch: Any, micro: int, ranks: int
) -> None:
    def steps_of(ranks: int, start: int, num: int, **how: Any) -> list[list[list[int]]]:
        orders = []
        for rank in range(ranks):
            place: Any = {"rank": rank, "world_size": ranks, "seq_len": 10}
            place |= {"consumed": lambda: start, **how}
            orders.append(global_order.GlobalOrder(50, batch, micro, **place))
        batches, sizes = zip(*orders, strict=False), orders[0].accumulations()
        steps = (islice(batches, next(sizes)) for _ in range(num))
        return [[batch for of_ranks in step for batch in of_ranks] for step in steps]

    speeds = [1.0] * (ranks - 1) + [0.5]
    work: Any = {"costs": np.square, "speeds": lambda position: speeds if position > 60 else None}
    num = 15 if batch is GROWS else 1
    plain, even = steps_of(ranks, 72, num), steps_of(ranks, 72, num, **work)
    for before, after in zip(plain, even, strict=True):
        assert sorted(sum(before, [])) == sorted(sum(after, [])), "the same samples"
        assert min(map(len, after)) >= 1
        if micro == 6:  # 2 of 3 parts
            of_ranks = [sum(map(len, after[rank::ranks])) for rank in range(ranks)]
            assert of_ranks == [2 * of_ranks[1], sum(of_ranks) // 3]
    done = sum(len(each) for step in plain[:7] for each in step)
    if num > 1:
        assert steps_of(ranks, 72 + done, num - 7, **work) == even[7:]


def test_measured_speeds_hold_from_a_position_and_for_the_ranks_that_were_measured() -> None:
    assert relative([0.2, 0.1, 0.105]) == [0.5, 1.0, 1.0]
    speeds = RankSpeeds(2, None)
    speeds.load([(32, [1.0, 0.5])])
    assert [speeds.at(position) for position in (0, 31, 32, 64)] == [None] * 2 + [[1.0, 0.5]] * 2
    other = RankSpeeds(3, None)
    other.load([(32, [1.0, 0.5])])
    assert other.at(64) is None, "three ranks are measured anew"
    given = RankSpeeds(2, [1, 0.25])
    given.load([(32, [1.0, 0.5])])
    assert given.at(64) == [1, 0.25]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", tiers(["ddp", "fsdp2", "zero2", "fsdp2_ep"], daily=["ddp", "fsdp2", "zero2"])
)
def test_balanced_ranks_train_to_the_same_losses(train: Trainings, strategy: str) -> None:
    """Labels are masked unevenly; the oracle is one process, which accumulates rows in order."""
    model = "deepseek_v3" if strategy.endswith("ep") else "llama"
    one = train(model, "one")
    speeds = ("--data.rank_speeds=[3, 1]", FOUR_ROWS)
    ways: dict[tuple[str, ...], list[int]] = {speeds: [6, 2]}
    if strategy == "ddp":
        ways[()] = [4, 4]
    for flags, expected in ways.items():
        many = train(model, strategy, "--data.balance=true", *flags)
        assert many.loss == pytest.approx(one.loss, rel=1e-6)
        assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        for step, rows in many.rows().items():
            assert sorted(rows) == sorted(one.rows()[step]), "the same samples in each step"
        assert {*map(tuple, counts(many).values())} == {tuple(expected)}
        work = read_run(many.run).metrics["rank/work_over_mean"].values
        assert work == pytest.approx(expected[0] / 4, rel=0.01), "rows of few documents"


def counts(record: RunRecord) -> dict[int, list[int]]:
    """The number of rows of each rank in each step."""
    found: dict[int, list[int]] = {}
    for rank in range(record.size):
        for event in record.events("rows", rank):
            of_ranks = found.setdefault(event["step"], [0] * record.size)
            of_ranks[rank] += len(event["rows"])
    return found


def sleep_by_tokens() -> None:
    """In each worker: each token takes rank 0 half a millisecond, and rank 1 a whole one."""
    mask_labels()
    step = LanguageModule.training_step

    def slowly(self: Any, batch: Any, batch_idx: int) -> Any:
        time.sleep(batch["input_ids"].numel() * (1 + int(os.environ["RANK"])) * 5e-4)
        return step(self, batch, batch_idx)

    LanguageModule.training_step = slowly


MEASURED_AFTER = SKIPPED_STEPS + MEASURED_STEPS
ROWS = 24
FLAGS = [f"--data.global_batch_size={ROWS}", f"--trainer.max_steps={MEASURED_AFTER + 4}"]
MEASURED = [*FLAGS, f"--data.micro_batch_size={ROWS // 2}", "--data.rank_speeds=measured"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["ddp", "fsdp2", "zero2"], daily=["fsdp2"]))
def test_a_slow_rank_gets_less_work(train: Trainings, strategy: str) -> None:
    """A run that is resumed gives it the same rows and has the same losses, to the bit, though no
    rank is slow any more: the measured speeds are in the checkpoint."""
    save = f"--last_checkpoint.every_n_steps={MEASURED_AFTER + 1}"
    slow = train.run("fit", "llama", strategy, *MEASURED, save, prelude=sleep_by_tokens)
    found = re.search(r"data.rank_speeds measured \[1.0, (\S+)\]: .*from sample (\d+)", slow.log())
    assert found, slow.log()[-3000:]
    speed, start = float(found[1]), int(found[2])
    assert 0.35 <= speed <= 0.65
    one = train("llama", "one", *FLAGS)
    assert slow.loss == pytest.approx(one.loss, rel=1e-6)
    of_slow = round(ROWS * speed / (1 + speed))
    for step, of_ranks in counts(slow).items():
        even = [ROWS // 2, ROWS // 2]
        assert of_ranks == (even if (step - 1) * ROWS < start else [ROWS - of_slow, of_slow]), step
    assert counts(slow)[MEASURED_AFTER + 3][1] < ROWS // 2

    saved = slow.run / "checkpoints" / manifest.name(MEASURED_AFTER + 1)
    resumed = train.run("fit", "llama", strategy, *MEASURED, f"--ckpt_path={saved}")
    assert "data.rank_speeds measured" not in resumed.log()
    assert resumed.loss and resumed.rows()
    for step, loss in resumed.loss.items():
        assert loss == slow.loss[step]
    for step, rows in resumed.rows().items():
        assert rows == slow.rows()[step]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rank_speeds": [1.0]}, r"rank_speeds \[1.0\]: give one number above 0 for each of the 2"),
        ({"rank_speeds": [1.0, 0.0]}, "give one number above 0"),
        ({"rank_speeds": [100.0, 1.0]}, "leaves rank 1 without a row in some of the 2"),
        ({"rank_speeds": "measured", "micro_batch_size": 1}, "no effect with data.micro_batch_si"),
        ({"balance": True, "cross_document_attention": True}, "data.balance has no effect"),
    ],
)
def test_what_cannot_be_balanced_is_refused(options: dict[str, Any], sentence: str) -> None:
    data = PackedText(**{"global_batch_size": 32, "micro_batch_size": 8, **options})
    with pytest.raises(InputError, match=sentence):
        data.check(world_size=2)


def test_one_process_has_no_speeds() -> None:
    for speeds in ([1.0], "measured"):
        with pytest.raises(InputError, match="no effect on one data-parallel rank: remove it"):
            PackedText(rank_speeds=speeds).check(world_size=1)


@pytest.mark.parametrize(
    ("strategy", "more", "sentence"),
    [
        ("ddp", ["--data.rank_speeds=[1, 0]"], "data.rank_speeds[1] is 0.0; give more than 0"),
        ("ddp", ["--data.rank_speeds=measured", "--model.blocks.compile=true"], "first steps comp"),
        ("zero3", ["--data.rank_speeds=measured"], "does not work with ZeRO stage 3"),
        ("pp", ["--data.rank_speeds=[1, 0.5]", "--trainer.devices=4"], "in a pipeline"),
        ("fsdp2_ep", ["--data.rank_speeds=measured"], "does not work with ep_size > 1"),
    ],
)
@pytest.mark.slow
def test_a_strategy_refuses_speeds_that_it_cannot_use(
    flags: list[str], strategy: str, more: list[str], sentence: str, capfd: Any
) -> None:
    given = [*flags, "--trainer.devices=2", *flags_of(strategy), *more]
    assert sentence in refused("fit", given, capfd)
