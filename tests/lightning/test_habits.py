"""Habits of people who train with Lightning end as plain Lightning's trainings do, uninterrupted,
and killed and resumed three times."""

from pathlib import Path

import pytest

from tests.lightning.arms import RANKS
from tests.lightning.habits import HABITS
from tests.lightning.seen import is_cell, verdict_of
from tests.lightning.verdicts import differences, oracle_of
from tests.support.tiers import tiers

CELLS = [(name, way) for name in HABITS for way in RANKS if is_cell(name, way)]
DAILY = [  # each stands for a fault that was found: docs/decisions/training.md
    ("warmup_then_plateau", "one"),
    ("keeps_everything", "one"),
    ("epoch_sums", "one"),
    ("resets_at_starts", "one"),
    ("states_of_ranks", "fsdp2"),
    ("batch_norm", "fsdp2"),
    ("own_sampler", "ddp"),
    ("averaged", "one"),
    ("frozen_at_first", "ddp"),
    ("overfits_a_share", "ddp"),
    ("accumulates_by_epoch", "one"),
    ("randomly_augmented", "ddp"),
    ("clamps_itself", "zero2"),
    ("gan", "fsdp2"),
]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "way"), tiers(CELLS, daily=DAILY))
def test_a_habit_trains_as_by_plain_lightning(name: str, way: str, tmp_path: Path) -> None:
    habit = HABITS[name]
    expected = oracle_of(habit, way, tmp_path)
    found = differences(habit, way, expected, tmp_path)
    assert verdict_of(habit, way, found) != "wrong", found
