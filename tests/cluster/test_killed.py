"""Killed ranks under the real launcher: the run resumes, with an uninterrupted run's weights."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dist_template.errors import Exit
from tests.support.injury import Step, Training, kill
from tests.support.library import read_full
from tests.support.runs import newest, run

KILLS = int(os.environ.get("KILLS", "20"))
EVERY = 10  # steps between two checkpoints


def lives(training: Training) -> list[list[Step]]:
    """Rank 0's steps, by process."""
    found: dict[Any, list[Step]] = {}
    for step in training.steps():
        found.setdefault(step.life, []).append(step)
    return [*found.values()]


def newest_of(root: Path, run_id: str) -> Path:
    return newest(root / "runs" / "default" / run_id)


@pytest.mark.nightly  # minutes; test_exact_resume.py kills ranks in `make test`
def test_a_kill_at_any_time_costs_at_most_one_interval(flags: list[str], tmp_path: Path) -> None:
    """`KILLS=50 pytest …` for more; the times are printed (`-s`)."""
    run("prepare", *flags)
    argv = ["fit", *flags, "--trainer.strategy=ddp", f"--trainer.max_steps={30 * KILLS}"]
    argv += ["--trainer.val_check_interval=500", "--trainer.log_every_n_steps=50"]
    argv += [f"--last_checkpoint.every_n_steps={EVERY}"]
    with Training(tmp_path / "reference", argv, NPROC="2") as reference:
        assert reference.end() == Exit.DONE, reference.log.read_text()[-3000:]
    chance = random.Random(KILLS)
    waits, lost = [], []
    with Training(tmp_path / "hurt", argv, NPROC="2", MAX_RESTARTS=str(KILLS)) as hurt:
        for trial in range(KILLS):
            hurt.wait(lambda trial=trial: len(lives(hurt)) > trial)
            begun = lives(hurt)[-1][0].step
            hurt.reach(begun + chance.randint(EVERY + 1, 2 * EVERY))
            at = time.time()
            kill(hurt.ranks()[chance.randrange(2)])
            hurt.wait(lambda trial=trial: len(lives(hurt)) > trial + 1)
            waits.append(lives(hurt)[-1][0].at - at)
            lost.append(lives(hurt)[-2][-1].step - lives(hurt)[-1][0].step)
        assert hurt.end(300) == Exit.DONE, hurt.log.read_text()[-3000:]
    print(f"first batch after {min(waits):.1f} to {max(waits):.1f} s, {max(lost)} steps lost")
    assert max(lost) <= EVERY
    one, other = (newest_of(tmp_path, name) for name in ("hurt", "reference"))
    one, other = (read_full(path)["state_dict"] for path in (one, other))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_signal_to_the_launcher_or_its_death_saves(flags: list[str], tmp_path: Path) -> None:
    run("prepare", *flags)
    argv = ["fit", *flags, "--trainer.strategy=ddp", "--trainer.max_steps=200"]
    argv += ["--last_checkpoint.every_n_steps=100"]
    last = 0
    with Training(tmp_path / "run", argv, NPROC="2") as training:
        for number, code in ((signal.SIGTERM, Exit.REQUEUE), (signal.SIGKILL, -signal.SIGKILL)):
            training.reach(last + 20, timeout_s=180)
            assert lives(training)[-1][0].step == last, "it has resumed there"
            ranks = [psutil.Process(pid) for pid in training.ranks().values()]
            kill(training.launcher.pid, number)
            assert training.end(10) == code
            assert psutil.wait_procs(ranks, timeout=10)[1] == []
            last = training.steps()[-1].step
            assert newest_of(tmp_path, "run").name == f"step{last:08}.ckpt", "no step is lost"
            if code == Exit.REQUEUE:
                training.start()
