"""Killed ranks, nodes and links under the real launcher: the run resumes with the same weights."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dist_template.errors import Exit
from tests.support.injury import Step, Training, TwoHosts, kill
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


LIMIT_S = 120.0  # for each of these waits, on a machine on which everything is slow


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if not shutil.which("ip"):
        pytest.skip("needs `ip` (iproute2)")
    try:
        with TwoHosts() as two:
            yield two
    except subprocess.CalledProcessError as error:
        pytest.skip(f"`ip netns add` is not allowed: {error.stderr}")


def seconds(what: str, until: Callable[[], bool]) -> None:
    """Wait, and print how long it took (`pytest -s`)."""
    begun = time.monotonic()
    while not until():
        assert time.monotonic() - begun < LIMIT_S, what
        time.sleep(0.02)
    print(f"{what}: {time.monotonic() - begun:.1f} s")


@pytest.mark.netns
@pytest.mark.nightly  # minutes; test_exit_codes.py is in `make test`
def test_what_is_left_goes_on(hosts: TwoHosts, flags: list[str], tmp_path: Path) -> None:
    run("prepare", *flags)
    argv = ["fit", *flags, "--trainer.strategy=ddp", "--trainer.max_steps=100000"]
    argv += ["--trainer.val_check_interval=5000", "--last_checkpoint.every_n_steps=20"]
    argv += ["--watchdog.timeout_s=10", "--trainer.log_every_n_steps=50"]
    options = {"NNODES": "1:2", "MAX_RESTARTS": "10", "DIST_RUN_ID": "hosts"}
    options["SHUTDOWN_TIMEOUT"] = "10"
    a, b = (hosts.training(host, tmp_path / "steps", argv, **options) for host in (0, 1))

    def restarts(what: str, act: Callable[..., Any], *arguments: Any) -> None:
        """Waits until rank 0 has a first batch after `act`."""
        lives = len({step.life for step in a.steps()})
        act(*arguments)
        seconds(what, lambda: len({step.life for step in a.steps()}) > lives)

    def has_ended() -> bool:
        return b.launcher.poll() is not None

    with a, b:
        a.reach(10)
        restarts("a worker killed, to the first batch on both", kill, *b.ranks().values())
        assert len(a.ranks()) == len(b.ranks()) == 1
        a.reach(a.steps()[-1].step + 25)
        restarts("the link cut (watchdog 10 s), to the first batch on one node", hosts.cut)
        seconds("  and to the other's exit", has_ended)
        assert b.launcher.returncode == Exit.REQUEUE
        hosts.cut(whole=True)
        restarts("the link mended and the node relaunched, to the first batch on both", b.start)
        a.reach(a.steps()[-1].step + 25)
        restarts("a node killed, to the first batch on the other", hosts.kill, 1)
        restarts("the node relaunched, to the first batch on both", b.start)
        a.reach(a.steps()[-1].step + 25)
        hosts.kill(0)
        seconds("the rendezvous's host killed, to the other's exit", has_ended)
        assert b.launcher.returncode == Exit.REQUEUE
        assert "the rendezvous is lost" in b.log.read_text()
