"""Two nodes, each a network namespace: a worker, the link, a node and the rendezvous are lost."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dist_template.errors import Exit
from tests.support.injury import Training, TwoHosts, kill
from tests.support.runs import run

LIMIT_S = 120.0  # for each of these waits, on a machine on which everything is slow


def no_namespaces() -> str:
    """Why there can be none here; "" where they can."""
    if not shutil.which("ip"):
        return "needs `ip` (iproute2)"
    add = ["ip", "netns", "add", "injury-try"]
    made = subprocess.run(add, capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", "injury-try"], capture_output=True, check=False)
    return f"`ip netns add` is not allowed: {made.stderr.strip()}" if made.returncode else ""


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if why := no_namespaces():
        pytest.skip(why)
    with TwoHosts() as two:
        yield two


def seconds(what: str, until: Callable[[], bool]) -> None:
    """Wait, and print how long it took (`pytest -s`)."""
    begun = time.monotonic()
    while not until():
        assert time.monotonic() - begun < LIMIT_S, what
        time.sleep(0.02)
    print(f"{what}: {time.monotonic() - begun:.1f} s")


def restarted(training: Training) -> Callable[[], bool]:
    """Whether rank 0 has had a first batch since now."""
    lives = len({step.life for step in training.steps()})
    return lambda: len({step.life for step in training.steps()}) > lives


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.nightly  # minutes; test_killed.py and test_exit_codes.py are in `make test`
def test_what_is_left_goes_on(hosts: TwoHosts, flags: list[str], tmp_path: Path) -> None:
    run("prepare", *flags)
    argv = ["fit", *flags, "--trainer.strategy=ddp", "--trainer.max_steps=100000"]
    argv += ["--trainer.val_check_interval=5000", "--last_checkpoint.every_n_steps=20"]
    argv += ["--watchdog.timeout_s=10", "--trainer.log_every_n_steps=50"]
    options = {"NNODES": "1:2", "MAX_RESTARTS": "10", "DIST_RUN_ID": "hosts"}
    options["SHUTDOWN_TIMEOUT"] = "10"
    a, b = (hosts.training(host, tmp_path / "steps", argv, **options) for host in (0, 1))
    with a, b:
        a.reach(10)

        again = restarted(a)
        kill(next(iter(b.ranks().values())))
        seconds("a worker killed, to the first batch on both", again)
        assert len(a.ranks()) == len(b.ranks()) == 1
        a.reach(a.steps()[-1].step + 25)

        again = restarted(a)
        hosts.cut()
        seconds("the link cut (watchdog 10 s), to the first batch on one node", again)
        seconds("  and to the other's exit", lambda: b.launcher.poll() is not None)
        assert b.launcher.returncode == Exit.REQUEUE

        hosts.cut(whole=True)
        again = restarted(a)
        b.start()
        seconds("the link mended and the node relaunched, to the first batch on both", again)
        a.reach(a.steps()[-1].step + 25)

        again = restarted(a)
        hosts.kill(1)
        seconds("a node killed, to the first batch on the other", again)

        again = restarted(a)
        b.start()
        seconds("the node relaunched, to the first batch on both", again)
        a.reach(a.steps()[-1].step + 25)

        hosts.kill(0)
        ended = lambda: b.launcher.poll() is not None  # noqa: E731
        seconds("the rendezvous's host killed, to the other's exit", ended)
        assert b.launcher.returncode == Exit.REQUEUE
        assert "the rendezvous is lost" in b.log.read_text()
