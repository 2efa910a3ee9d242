"""`launch` in a process of its own, on hosts that are this machine, under Slurm or under Ray."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.support.injury import OF_A_LAUNCHER
from tests.support.runs import PACKAGE, PROJECT, Workers, logged, run
from tests.support.waiting import until

ENVIRONMENT = {"PYTHONPATH": os.environ["PYTHONPATH"], "DS_ACCELERATOR": "cpu"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "MAX_RESTARTS": "0"}  # of torchrun
ONE_BATCH = "--trainer.limit_val_batches=1"
STEPS = ["--trainer.max_steps=4", "--trainer.val_check_interval=1000", ONE_BATCH]
LONG = ["--trainer.max_steps=100000", "--trainer.val_check_interval=100000", ONE_BATCH]
DIVERGING = ["--trainer.max_steps=100", "--model.optim.learning_rate=1e30"]
DIVERGING.append("--model.optim.warmup=0")
APPLE = "--trainer.accelerator=mps"  # refused by the nodes, which have none
SSH = """#!/bin/sh
# A host that is this machine: runs a command with the environment of a login.
case $1 in
    hangs) sleep 1000 & wait;;
    down) echo "ssh: connect to host down port 22: Connection refused" >&2; exit 255;;
esac
exec env -i HOME="$HOME" PATH=/usr/local/bin:/usr/bin:/bin sh -c "$2"
"""


def site(folder: Path, environment: Any = None, **keys: Any) -> str:
    """The flag of a file with `cluster`; `environment` is added to what every process needs."""
    path = folder / "site.yaml"
    cluster = {"environment": ENVIRONMENT | (environment or {}), **keys}
    path.write_text(yaml.safe_dump({"cluster": cluster}))
    return f"--config={path}"


def hosts(folder: Path, names: Any = ("node1", "node2"), **keys: Any) -> str:
    """The same, with hosts that a script in place of ssh reaches."""
    ssh = folder / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    return site(folder, **{"hosts": [*names], "ssh": str(ssh), "master": "127.0.0.1", **keys})


def one_machine(flags: list[str], folder: Path) -> dict[int, float]:
    """The losses of `fit` on two processes of this machine, after `prepare`."""
    assert run("prepare", *flags) == 0
    argv = ["fit", *flags, "--trainer.devices=2", "--run.name=one"]
    return Workers(2).run(argv, folder / "one").check().loss


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
        metrics = self.run / "metrics.jsonl"

        def said() -> str:
            return self.out.read_text()[-3000:]

        def is_logged() -> bool:
            assert not self.process.poll(), said()
            return metrics.exists() and max(logged(self.run, "train/loss"), default=0) >= step

        until(is_logged, said, poll_s=0.3)

    def rank(self, node: int) -> int:
        for process in psutil.process_iter(["cmdline", "environ"]):
            own, words = process.info["environ"] or {}, process.info["cmdline"] or []
            is_node = str(node) in (own.get("NODE_RANK"), own.get("SLURM_NODEID"))
            if is_node and own.get("DIST_RUN_ID") == self.run.name and PACKAGE in words[2:4]:
                return process.pid
        raise AssertionError(f"no rank of node {node}")


def row(on: str, flags: list[str], losses: dict[int, float], start: Callable[..., Launched]) -> str:
    """A row of the table in docs/launch.md: how far the losses of `STEPS` are from `losses`, and
    the exit codes of five runs, which `start(name, flags, environment)` launches."""
    first = start("finished", [*flags, *STEPS], {})
    codes = [first.end(), start("bad", [*flags, *STEPS, APPLE], {}).end()]
    codes.append(start("diverged", [*flags, *DIVERGING], {}).end())
    stopped = start("stopped", [*flags, *LONG], {})
    stopped.reach(3)
    stopped.stop(signal.SIGUSR1)
    codes.append(stopped.end())
    killed = start("killed", [*flags, *LONG], {})
    killed.reach(3)
    os.kill(killed.rank(1), signal.SIGKILL)
    codes.append(killed.end())
    own = logged(first.run, "train/loss")
    equal = "equal" if own == pytest.approx(losses, abs=1e-6) else "differ"
    return f"| {on} | {equal} | " + " | ".join(map(str, codes)) + " |"
