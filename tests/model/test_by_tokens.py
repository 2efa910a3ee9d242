"""Values by consumed tokens: phases, batch sizes, sentences for wrong ones."""

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.demos.boring_classes import BoringDataModule
from torch import nn

from dist_template import InputError, OptimConfig
from dist_template.by_tokens import BatchSizes, Phase, check_phases, described, value_at
from tests.support.library import optim

T = 10**12
# arXiv:2412.19437, section 4.2, with a step of 256 sequences
BATCH = [Phase(3072, 0), Phase(15360, 0.469 * T, "linear", 256), Phase(15360)]
RATE = [
    Phase(2.2e-4, 10 * T), Phase(2.2e-5, 14.3 * T, "cosine"), Phase(2.2e-5, 14.633 * T),
    Phase(7.3e-6),
]  # fmt: skip


def test_the_schedules_of_deepseek_v3() -> None:
    expected = {0: 2.2e-4, 9.99: 2.2e-4, 12.15: 1.21e-4, 14.3: 2.2e-5, 14.6: 2.2e-5, 14.7: 7.3e-6}
    for tokens, rate in expected.items():
        assert value_at(RATE, tokens * T) == pytest.approx(rate, rel=1e-9), tokens
    sizes = BatchSizes(BATCH, 4096)
    half = 0.469 * T / 4096 / 2  # in rows
    assert [sizes.at(int(each * half) + 1) for each in range(3)] == [3072, 9216, 15360]
    assert sizes.at(sizes.changes[1][1]) == 3072 + 256, "the first change is by one step"
    assert sizes.divisor == 256
    assert BatchSizes(BATCH[::2], 4096).divisor == 3072
    assert described(RATE[:2], BatchSizes(15360, 4096)) == (
        "0.00022 until 10 T tokens (step 158,946), then cosine to 2.2e-05 until 14.3 T tokens"
        " (step 227,293)"
    )


PHASE = st.tuples(
    st.integers(1, 6), st.integers(1, 300), st.sampled_from(["constant", "linear", "cosine"])
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(PHASE, min_size=1, max_size=4), st.sampled_from([1, 2]), st.integers(1, 9))
def test_samples_and_steps_are_those_of_a_walk(phases: Any, unit: int, seq_len: int) -> None:
    """Up and down, over ends inside of a step, and several in one."""
    ends, given = [*accumulate(end for _, end, _ in phases)], [Phase(unit, 0)]
    for (value, _, shape), end in zip(phases, ends, strict=True):
        given.append(Phase(value * unit, end, shape, unit))
    sizes, samples = BatchSizes([*given, Phase(given[-1].value)], seq_len), 0
    for step in range(100):
        assert sizes.samples(step) == samples
        assert sizes.at(samples) % sizes.divisor == 0 < sizes.at(samples)
        assert sizes.steps(samples * seq_len) == step
        samples += sizes.at(samples)


WRONG = {
    "the last, which must have none": [Phase(1, 5)],
    "but the last": [Phase(1), Phase(2)],
    "grow from phase to phase": [Phase(1, 5), Phase(2, 5), Phase(3)],
    "0 or more": [Phase(1, -1), Phase(2)],
    "must be constant": [Phase(1, 5, "linear"), Phase(2)],
    "must divide": [Phase(4, 5), Phase(8, 9, "linear", 3), Phase(8)],
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_phases_are_refused(sentence: str) -> None:
    with pytest.raises(InputError, match=rf"^a\.key has phases until .*{sentence}"):
        check_phases("a.key", WRONG[sentence])


class Data:
    """Samples that were consumed, in batches that grow."""

    def __init__(self, batch: Any) -> None:
        self.batch_sizes, self.consumed_samples = BatchSizes(batch, 10), 0

    def rates(self, config: OptimConfig, num_steps: int) -> list[float]:
        optimizer = optim.build_optimizer(nn.Linear(2, 2), config)
        scheduler = optim.build_schedule(optimizer, config, num_steps, data=self)["scheduler"]
        found = []
        for _ in range(num_steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            self.consumed_samples += self.batch_sizes.at(self.consumed_samples)
            scheduler.step()
        return found


def test_the_learning_rate_is_a_function_of_samples_where_batches_grow() -> None:
    """A step of 4 rows is one of 2 rows twice; the second half of training has half of the steps."""
    grows, even = Data([Phase(2, 80), Phase(4)]), Data(2)
    config = OptimConfig(warmup=2, schedule="cosine")
    rates, of_even = grows.rates(config, 6), even.rates(config, 8)
    assert rates == pytest.approx(of_even[:4] + of_even[4::2])


def test_phases_of_the_learning_rate_have_a_warm_up_and_refuse_what_they_do_not_read() -> None:
    phases: Any = [Phase(0.4, 100), Phase(0.2, 120), Phase(0.1)]
    config = OptimConfig(learning_rate=phases, warmup=3, schedule="constant")
    assert Data(2).rates(config, 8) == pytest.approx([0, 0.4 / 3, 0.8 / 3, 0.4, 0.4, 0.2, 0.1, 0.1])
    optimizer = optim.build_optimizer(nn.Linear(2, 2), config)
    with pytest.raises(InputError, match="BoringDataModule, which does not count tokens"):
        optim.build_schedule(optimizer, config, 10, data=BoringDataModule())
    config.lr_scheduler = {"class_path": "torch.optim.lr_scheduler.ConstantLR", "init_args": {}}
    with pytest.raises(InputError, match="do not work with --lr_scheduler"):
        optim.build_schedule(optimizer, config, 10)
    plateau: Any = SimpleNamespace(batch_sizes=BatchSizes(phases, 1))
    config = OptimConfig()
    config.lr_scheduler = {
        "class_path": "lightning.pytorch.cli.ReduceLROnPlateau",
        "init_args": {"monitor": "eval/loss"},
    }
    with pytest.raises(InputError, match="ReduceLROnPlateau does not work with phases"):
        optim.build_schedule(optimizer, config, 10, data=plateau)
