"""`python -m tests.lightning [WAY …] [--habit NAME …]`: prints the cells of the table, with what
differs. `--record` keeps what was seen for docs/habits.md, if it was killed at all places."""

import argparse
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.lightning import seen
from tests.lightning.arms import RANKS, Habit
from tests.lightning.habits import HABITS, SUBJECTS
from tests.lightning.verdicts import KILLS, differences, oracle_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="*", default=[*RANKS])
    parser.add_argument("--habit", nargs="*", default=[*HABITS])
    parser.add_argument("--subject", choices=[*SUBJECTS])
    parser.add_argument("--kills", type=int, nargs="*", default=KILLS, help="after these steps")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--again", action="store_true", help="also cells that are recorded")
    given = parser.parse_args()
    if given.subject:
        given.habit = [*SUBJECTS[given.subject].HABITS]
    for name in given.habit:
        cells = [way for way in given.ways if seen.is_cell(name, way)]
        todo = [way for way in cells if given.again or not seen.verdict(name, way)]
        with tempfile.TemporaryDirectory() as folder:
            for way in todo:
                found = cell(HABITS[name], way, Path(folder), given.kills)
                verdict = seen.verdict_of(HABITS[name], way, found)
                print(f"{name} {way}: {verdict}", *found, sep="\n    ", flush=True)
                if given.record and given.kills == KILLS:
                    seen.record(name, way, verdict)


def cell(habit: Habit, way: str, folder: Path, kills: Sequence[int]) -> list[str]:
    """Returns what differs from plain Lightning's training, which ways of as many ranks share."""
    try:
        expected = oracle_of(habit, way, folder)
        return differences(habit, way, expected, folder / way, kills)
    except Exception as error:
        traceback.print_exc()
        return [f"{type(error).__name__}: {str(error)[:600]}"]


main()
