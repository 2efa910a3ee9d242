"""What was seen of each cell when it was last run: seen.json, beside this file.

The page shows a cell only if it is here, so that it says no more than somebody has seen."""

import fcntl
import json
from functools import cache
from pathlib import Path

from tests.lightning.arms import Habit
from tests.lightning.habits import SUBJECTS

FILE = Path(__file__).with_name("seen.json")
KILLED = "killed"  # begins a difference of a resumed training


def is_cell(name: str, way: str) -> bool:
    """Whether the table has the cell: three ranks are of loaders alone."""
    return way != "ddp3" or name in SUBJECTS["loaders"].HABITS


def expected(habit: Habit, way: str) -> str:
    """Returns the verdict that the habit's author gives."""
    if habit.refusal(way):
        return "refused"
    return "other" if habit.is_different(way) else "equal"


def verdict_of(habit: Habit, way: str, differences: list[str]) -> str:
    """Returns the verdict of a cell that was run: the expected one, or "wrong". A training that
    differs from plain Lightning's on purpose resumes as itself."""
    author = expected(habit, way)
    is_resumed = not any(each.startswith(KILLED) for each in differences)
    is_right = bool(differences) == (author == "other") and is_resumed
    return author if is_right else "wrong"


@cache
def _read() -> dict[str, dict[str, str]]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def verdict(name: str, way: str) -> str:
    """Returns the verdict that was seen; "" of a cell that was not run."""
    return _read().get(name, {}).get(way, "")


def record(name: str, way: str, verdict: str) -> None:
    """Keeps a verdict. Several processes may record."""
    with FILE.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = json.loads(file.read() or "{}")
        known.setdefault(name, {})[way] = verdict
        file.truncate(0)
        file.write(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
