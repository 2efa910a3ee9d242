"""A part of a module with a state of its own keeps it in checkpoints of every format."""

from pathlib import Path

import pytest

from tests.lightning.arms import ours, read
from tests.lightning.habits import HABITS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ways", [("zero2", "fsdp2", "ddp"), ("ddp", "zero2", "fsdp2")])
def test_an_extra_state_is_read_by_other_strategies(ways: tuple[str, ...], tmp_path: Path) -> None:
    habit = HABITS["keeps_parts"]  # `set_extra_state` asserts what it is given
    for step, way in zip((3, 6, 0), ways, strict=True):
        record = ours(habit, way, tmp_path, kill_at=step, resumes=way != ways[0])
    record.check()
    states = read(tmp_path / "resumed")[0]["weights"]["counter._extra_state"]
    assert states["steps"] == 18 and [*states["newest"]] == [17, 18]
