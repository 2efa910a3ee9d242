"""`launch` in a process of its own, on hosts that are loopback or under Slurm."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.support.injury import OF_A_LAUNCHER
from tests.support.loopback import Hosts
from tests.support.runs import PACKAGE, PROJECT, logged

ENVIRONMENT = {"PYTHONPATH": os.environ["PYTHONPATH"], "DS_ACCELERATOR": "cpu"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "MAX_RESTARTS": "0"}  # of torchrun
ONE_BATCH = "--trainer.limit_val_batches=1"
STEPS = ["--trainer.max_steps=4", "--trainer.val_check_interval=1000", ONE_BATCH]
LONG = ["--trainer.max_steps=100000", "--trainer.val_check_interval=100000", ONE_BATCH]
LAUNCHERS = ("ssh", "torchrun")
# The command line refuses it, in the processes of the job.
VARIABLE = {"PL_FIT__TRAINER__MAX_STEPS": "9"}


def site(folder: Path, environment: Any = None, **keys: Any) -> str:
    """The flag of a file with `cluster`; `environment` is added to what every process needs."""
    path = folder / "site.yaml"
    cluster = {"environment": ENVIRONMENT | (environment or {}), **keys}
    path.write_text(yaml.safe_dump({"cluster": cluster}))
    return f"--config={path}"


def two(known: Hosts, folder: Path, **keys: Any) -> str:
    """The same, of two hosts."""
    hosts = {"hosts": ["node1", "node2"], "ssh": known.ssh, "master": "127.0.0.1"}
    return site(folder, **(hosts | keys))


class Launched:
    """`launch` in a process of its own; `run` is its folder."""

    def __init__(self, folder: Path, on: str, *flags: str, name: str = "") -> None:
        name = name or on
        self.run = folder / "runs" / "default" / name
        self.out = folder / f"{name}.out"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(OF_A_LAUNCHER)}
        kept |= {k: v for k, v in os.environ.items() if k == "SLURM_CONF"}
        options: Any = {"cwd": PROJECT, "env": kept | {"DIST_RUN_ID": name}}
        command = [sys.executable, "-m", PACKAGE, "launch", f"--on={on}", *flags]
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, **options)

    def stop(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        return self.process.wait(300)

    def reach(self, step: int) -> None:
        """Waits until a step is logged."""
        deadline = time.monotonic() + 200
        metrics = self.run / "metrics.jsonl"
        while not metrics.exists() or max(logged(self.run, "train/loss"), default=0) < step:
            is_alive = not self.process.poll() and time.monotonic() < deadline
            assert is_alive, self.out.read_text()[-3000:]
            time.sleep(0.3)

    def rank(self, node: int) -> int:
        """The process of a node's rank."""
        of_node = {f"NODE_RANK={node}".encode(), f"SLURM_NODEID={node}".encode()}
        run = f"DIST_RUN_ID={self.run.name}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                own = set((entry / "environ").read_bytes().split(b"\0"))
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if PACKAGE.encode() in words[2:4] and run in own and of_node & own:
                    return int(entry.name)
        raise AssertionError(f"no rank of node {node}")


DIVERGING = """--trainer.max_steps=100 --model.optim.learning_rate=1e30
    --model.optim.warmup=0""".split()


def diverging(flags: list[str]) -> list[str]:
    return [*flags, *DIVERGING]


def codes(
    start: Callable[..., Launched], flags: list[str], end: Callable[[Launched], int]
) -> dict[str, int]:
    """The exit codes of five runs: `start(name, flags, environment)` launches, `end` waits."""
    found = {"finished": end(start("finished", [*flags, *STEPS], {}))}
    found["bad input"] = end(start("bad", [*flags, *STEPS], VARIABLE))
    found["non-finite"] = end(start("diverged", diverging(flags), {}))
    run = start("stopped", [*flags, *LONG], {})
    run.reach(3)
    run.stop(signal.SIGUSR1)
    found["SIGUSR1"] = end(run)
    run = start("killed", [*flags, *LONG], {})
    run.reach(3)
    os.kill(run.rank(1), signal.SIGKILL)
    found["rank killed"] = end(run)
    return found


def row(on: str, difference: float, found: dict[str, int]) -> str:
    """A row of the table in docs/launch.md."""
    equal = "equal" if difference <= 1e-6 else f"differ by {difference:.0e}"
    return f"| {on} | {equal} | " + " | ".join(str(code) for code in found.values()) + " |"
