"""python -m benchmarks.against [COMMIT]: has anything become slower since a commit? For a nightly
job.

The parts step, startup and dist run in turns, in the present tree and, twice a round, in a work
tree of COMMIT: the newest release's tag, or else the commit of the recorded result. The two runs of
the old tree show how much a figure differs by chance; a figure that has become worse by more than
that, and by more than 3 %, is a failure: exit code 1.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from . import ROOT
from .record import RESULTS

PARTS = ("step", "startup", "dist")
LEAST = 0.03  # share by which a figure must be worse


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.against", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument(
        "commit", nargs="?", help="default: the newest release, else the recorded result's"
    )
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("give --rounds of 2 or more, to know what chance does")
    tags = git("tag", "--list", "v*", "--merged", "HEAD", "--sort=-v:refname").split()
    recorded = json.loads((RESULTS / "step.json").read_text("utf-8"))["commit"].removesuffix(
        "+changes"
    )
    commit = given.commit or (tags[0] if tags else recorded)
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        git("worktree", "add", "--quiet", "--detach", str(old), commit)
        try:
            (old / "build").mkdir(exist_ok=True)
            (old / "build" / "peers").symlink_to(ROOT / "build" / "peers")
            worse = [line for part in PARTS for line in compared(part, old, given.rounds)]
        finally:
            git("worktree", "remove", "--force", str(old))
    print("\n".join(worse) or f"nothing is slower than in {commit}, beyond chance")
    return int(bool(worse))


def compared(part: str, old: Path, rounds: int) -> list[str]:
    """Returns a sentence for each figure that has become worse."""
    trees = {"new": ROOT, "old": old, "old again": old}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    is_more: dict[str, bool] = {}  # whether more of it is worse
    for number in range(rounds):
        for name in random.sample([*trees], len(trees)):
            for figure in measured(part, trees[name]):
                if figure["at_most"] is not None or figure["at_least"] is not None:
                    is_more[figure["what"]] = figure["at_most"] is not None
                    found[figure["what"]][name].append(statistics.median(figure["values"]))
        print(f"  {part}: round {number + 1} of {rounds}", flush=True)
    return [line for what, runs in found.items() for line in verdict(what, runs, is_more[what])]


def verdict(what: str, runs: dict[str, list[float]], is_more: bool) -> list[str]:
    """Returns a sentence where one figure, of its values in each round, is worse."""
    rounds = [*zip(*(runs.get(name, []) for name in ("new", "old", "old again")), strict=False)]
    if not rounds or min(value for each in rounds for value in each) <= 0:
        return []  # one of the trees does not have it, or it is a count that was 0
    sign = 1 if is_more else -1
    change = statistics.median(
        sign * math.log(new / math.sqrt(old * again)) for new, old, again in rounds
    )
    chance = max(abs(math.log(old / again)) for _, old, again in rounds)
    line = (
        f"{what}: {math.expm1(change):+.1%} (+ is worse), by chance up to {math.expm1(chance):.1%}"
    )
    print(f"  {line}", flush=True)
    return [line] if change > max(chance, LEAST) else []


def measured(part: str, tree: Path) -> list[dict]:
    """Returns the figures of one run in a tree, with its own benchmark and library."""
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-m", "benchmarks", part, "--rounds", "1", "--output", output]
        env = os.environ | {"PYTHONPATH": str(tree / "src")}
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(
                f"{part} failed in {tree}:\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
            )
        return json.loads((Path(output) / f"{part}.json").read_text("utf-8"))["figures"]


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
