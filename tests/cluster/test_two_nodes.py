"""Two nodes, each a network namespace: a worker, the link, a node and the rendezvous are lost."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_template.errors import Exit
from tests.support.injury import TwoHosts, kill
from tests.support.runs import run

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
@pytest.mark.nightly  # minutes; test_killed.py and test_exit_codes.py are in `make test`
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
