"""`python -m tests.lightning [WAY …] [--habit NAME …]`: prints the table's cells that differ."""

import argparse
import tempfile
import traceback
from pathlib import Path

from tests.lightning.arms import RANKS
from tests.lightning.habits import HABITS, SUBJECTS
from tests.lightning.verdicts import differences, oracle_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="*", default=[*RANKS])
    parser.add_argument("--habit", nargs="*", default=[*HABITS])
    parser.add_argument("--subject", choices=[*SUBJECTS])
    parser.add_argument("--places", type=int, default=3, help="at which it is killed")
    given = parser.parse_args()
    if given.subject:
        given.habit = [*SUBJECTS[given.subject].HABITS]
    for name in given.habit:
        with tempfile.TemporaryDirectory() as folder:
            for way in given.ways:
                cell = Path(folder) / f"{name}-{way}"
                try:
                    expected = oracle_of(HABITS[name], way, cell)
                    found = differences(HABITS[name], way, expected, cell, given.places)
                except Exception as error:
                    traceback.print_exc()
                    found = [f"{type(error).__name__}: {str(error)[:600]}"]
                print(f"{name} {way}: {'equal' if not found else ''}", flush=True)
                for each in found:
                    print(f"    {each}", flush=True)


main()
