"""Arms that take turns of some optimizer steps: drift of the machine, and others' load on it, meets all alike.

Two trainings of two processes each do not fit beside one another on two cores, and one after the other they are a
quarter of a minute apart, in which such a machine becomes faster or slower by several percent. So all arms of a round
are started, and all but one stand still at a named pipe.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Turns:
    """Of one arm.

    Args:
        folder: Of a named pipe for each rank of each arm.
        arm: Which it is, from 0.
        arms: How many there are.
        ranks: Of each.
        steps: Optimizer steps of a turn.
    """

    folder: Path
    arm: int
    arms: int
    ranks: int
    steps: int

    def wait(self) -> None:
        """On each rank, until every rank of the arm before has passed the turn on."""
        with self._pipe(self.arm, int(os.environ["RANK"])).open("r+b", buffering=0) as pipe:
            missing = self.ranks
            while missing:
                missing -= len(pipe.read(missing) or b"")

    def pass_on(self) -> None:
        """To the next arm, which begins when all ranks of this one have called."""
        for rank in range(self.ranks):
            with self._pipe((self.arm + 1) % self.arms, rank).open("r+b", buffering=0) as pipe:
                pipe.write(b".")

    def _pipe(self, arm: int, rank: int) -> Path:
        return self.folder / f"{arm}_{rank}"


@contextlib.contextmanager
def turns(arms: int, ranks: int, steps: int) -> Generator[list[Turns]]:
    """One for each arm, the first of which may begin."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        each = [Turns(folder, arm, arms, ranks, steps) for arm in range(arms)]
        for arm in range(arms):
            for rank in range(ranks):
                path = each[arm]._pipe(arm, rank)
                os.mkfifo(path)
                held = os.open(path, os.O_RDWR)  # what is in a pipe that nobody has open is lost
                stack.callback(os.close, held)
                if arm == 0:
                    os.write(held, b"." * ranks)
        yield each
