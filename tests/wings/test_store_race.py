"""Two launches of one run at the same time, each with a disk of its own and one store: trainings.

Each launch is a forked process that takes itself for another machine's, so that the lease decides;
its beats are shorter."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import SIGKILL
from typing import Any

import lightning as L
import pytest
from lightning.pytorch import Callback

from dist_template.checkpoint import manifest
from dist_template.cluster import run_lock
from dist_template.errors import Exit
from dist_template.wings.rehearse.workers import clean_processes
from dist_template.wings.store import lock
from dist_template.wings.store.lock import StoreLock
from tests.support.line import command
from tests.support.runs import logged, only_run, run
from tests.support.waiting import LIMIT_S, until

RUN = "default/race"
HELD, FREE = "held", "free"  # a training waits at a step while there is the first file, not after


class Hold(Callback):
    """Stops before step `step` + 1 until the test lets it go on, or kills it; its checkpoints are
    in the store."""

    def __init__(self, folder: str, step: int) -> None:
        self.folder, self.step = Path(folder), step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.step:
            for callback in trainer.callbacks:  # ty: ignore[missing-attribute]
                getattr(callback, "settle", int)()
            (self.folder / HELD).touch()
            until((self.folder / FREE).exists)


def launch(folder: Path, disk: str, together: int, argv: list[str]) -> None:
    """`fit` in a process: on another machine than the others, with its own disk. It waits before it
    takes the lock until `together` launches are there."""
    os.chdir(folder / disk)
    os.environ["DIST_RUN_ID"] = "race"
    this, take = run_lock.this_process, StoreLock.take
    run_lock.this_process = lambda: {**this(), "machine": disk, "host": disk}  # ty: ignore
    lock.BEAT_S, lock.LEASE_S, lock.SETTLE_S = 1.0, 15.0, 0.5

    def take_together(self: StoreLock) -> str | None:
        (folder / f"at_lock_{disk}").touch()
        until(lambda: len([*folder.glob("at_lock_*")]) >= together)
        return take(self)

    StoreLock.take = take_together
    with (folder / f"{disk}.log").open("w", encoding="utf-8", buffering=1) as log:
        sys.stdout = sys.stderr = log
        try:
            code = command(["fit", *argv])
        except SystemExit as ended:
            code = int(ended.code or 0)
    os._exit(code)


class Launches:
    """Launches of one run, each a process with a folder of its own below `folder`."""

    def __init__(self, folder: Path, argv: list[str]) -> None:
        self.folder, self.store = folder, folder / "store"
        self.argv = [*argv, "--run.root=runs", f"--run.store=file://{self.store}"]
        self.argv += ["--last_checkpoint.every_n_steps=5", "--store.every_s=0"]
        self.processes: dict[str, BaseProcess] = {}

    def start(self, *disks: str, hold: int = 0, flags: tuple[str, ...] = ()) -> None:
        """Starts launches on these disks at once, which hold after step `hold`."""
        argv = [*self.argv, *flags, f"--trainer.callbacks+={__name__}.Hold"]
        argv += [f"--trainer.callbacks.folder={self.folder}", f"--trainer.callbacks.step={hold}"]
        for path in self.folder.glob("at_lock_*"):
            path.unlink()
        for disk in disks:
            (self.folder / disk).mkdir(exist_ok=True)
            args = (self.folder, disk, len(disks), argv)
            self.processes[disk] = clean_processes().Process(target=launch, args=args)
            self.processes[disk].start()

    def end(self, disk: str) -> int | None:
        """Waits for a launch; returns its exit code."""
        process = self.processes.pop(disk)
        process.join(LIMIT_S)
        return process.exitcode

    def kill(self, disk: str) -> None:
        assert self.holder()["machine"] == disk
        self.processes[disk].kill()
        assert self.end(disk) == -SIGKILL

    def holder(self) -> dict[str, Any]:
        return json.loads((self.store / RUN / ".lock").read_text())

    def refused(self) -> tuple[str, str]:
        """Waits for the launch that is refused in one sentence; returns its disk, and the other."""
        first = until(lambda: [d for d, p in self.processes.items() if p.exitcode is not None])
        (loser,) = first
        (winner,) = {*self.processes} - {loser}
        log = (self.folder / f"{loser}.log").read_text()
        assert self.end(loser) == Exit.BAD_INPUT, log
        (sentence,) = [line for line in log.splitlines() if "is in use by process" in line]
        assert "another DIST_RUN_ID or run.name" in sentence and "Traceback" not in log
        return loser, winner


@pytest.fixture
def launches(flags: list[str], tmp_path: Path) -> Iterator[Launches]:
    assert run("prepare", *flags) == 0
    found = Launches(tmp_path, flags)
    yield found
    for process in found.processes.values():
        process.kill()


@pytest.fixture
def losses(flags: list[str], tmp_path: Path) -> dict[int, float]:
    """Of a training that nothing disturbs."""
    assert run("fit", *flags, "--run.name=whole") == 0
    return logged(only_run(tmp_path, "whole"), "train/loss")


def steps_in(folder: Path) -> list[int]:
    return sorted(map(manifest.step_of, folder.glob("checkpoints/step*")))


@pytest.mark.slow
def test_of_two_trainings_one_is_refused_and_takes_over_when_the_other_is_killed(
    launches: Launches, losses: dict[int, float], tmp_path: Path
) -> None:
    launches.start("one", "two", hold=12)
    loser, winner = launches.refused()
    assert [*(tmp_path / loser).glob("runs/*/*")] == [], "it leaves no folder of a run"
    until((tmp_path / HELD).exists)
    stored = launches.store / RUN
    assert steps_in(stored) == steps_in(tmp_path / winner / "runs" / RUN) == [5, 10]
    launches.kill(winner)
    (tmp_path / FREE).touch()
    launches.start(loser, flags=("--ckpt_path=last",))
    assert launches.end(loser) == Exit.DONE, (tmp_path / f"{loser}.log").read_text()
    assert not (stored / ".lock").exists() and steps_in(stored) == [15, 20]
    assert logged(stored, "train/loss") == losses


@pytest.mark.slow
@pytest.mark.nightly
def test_of_two_restarts_on_two_disks_one_continues(
    launches: Launches, losses: dict[int, float], tmp_path: Path
) -> None:
    launches.start("zero", hold=12)
    until((tmp_path / HELD).exists)
    launches.kill("zero")
    shutil.rmtree(tmp_path / "zero")
    (tmp_path / HELD).unlink()
    launches.start("one", "two", hold=17, flags=("--ckpt_path=last",))
    _, winner = launches.refused()
    (tmp_path / FREE).touch()
    assert launches.end(winner) == Exit.DONE, (tmp_path / f"{winner}.log").read_text()
    assert logged(launches.store / RUN, "train/loss") == losses
    assert steps_in(launches.store / RUN) == [15, 20]
