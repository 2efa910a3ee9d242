"""The one helper that hurts a training: kills, stops, signals, corrupts, cuts; and sees how it goes
on.

    with Training(folder, argv, NPROC="2") as training:      # launch/torchrun.sh, as a user starts
        it training.reach(10)
        kill(training.ranks()[1])
        assert training.end() == Exit.DONE

Its ranks run this module instead of the package: the same command, and every step is written down
(`Step`).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests import PROJECT

STEPS = "INJURY_STEPS"  # the folder where ranks write their steps down
STEP_S = "INJURY_STEP_S"  # seconds that every step takes longer
OF_A_LAUNCHER = (
    "DIST_", "TORCHELASTIC", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "NODE_RANK", "SLURM_",
    "INJURY",
)  # fmt: skip


class Step(NamedTuple):
    """An optimizer step that a rank finished; step 0 of a life is its first batch."""

    at: float  # time.time()
    life: str  # the process's number
    event: str  # batch (the first of a life begins), step, end
    step: int


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal: SIGKILL, SIGSTOP (a hang), SIGTERM …"""
    os.kill(pid, number)


def corrupt(checkpoint: Path, chance: random.Random) -> str:
    """Flip one bit of one of its files, or cut one short; returns what was done."""
    path = chance.choice(
        [file for file in sorted(checkpoint.rglob("*")) if file.is_file() and file.stat().st_size]
    )
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    if chance.random() < 0.5:
        data[at] ^= 1 << chance.randrange(8)
        what = f"bit of byte {at}"
    else:
        del data[at:]
        what = f"bytes from {at} on"
    path.write_bytes(data)
    return f"{path.relative_to(checkpoint.parent)}: {what}"


class TwoHosts:
    """Two network namespaces, `names`, on one link; each has nothing but it and its loopback. Needs
    root and `ip`."""

    names = ("injury-a", "injury-b")
    addresses = ("10.77.0.1", "10.77.0.2")

    def __enter__(self) -> TwoHosts:
        self.__exit__()
        for name in self.names:
            _ip("netns", "add", name)
        _ip(
            "link",
            "add",
            "veth-a",
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            "veth-b",
            "netns",
            self.names[1],
        )
        for name, address, link in zip(
            self.names, self.addresses, ("veth-a", "veth-b"), strict=True
        ):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", link, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for host, name in enumerate(self.names):
            if Path("/run/netns", name).exists():
                self.kill(host)
                _ip("netns", "delete", name)

    def training(self, host: int, folder: Path, argv: list[str], **environment: str) -> Training:
        """One node's launcher, not yet started; host 0 is the rendezvous's."""
        environment |= {
            "NPROC": "1",
            "RDZV_ENDPOINT": f"{self.addresses[0]}:29400",
            "RDZV_CONF": f"is_host={'true' if host == 0 else 'false'}",
            "LOCAL_ADDR": self.addresses[host],
            "GLOO_SOCKET_IFNAME": ("veth-a", "veth-b")[host],
            STEPS: str(folder),
        }
        enter = ("ip", "netns", "exec", self.names[host])
        return Training(folder / f"host{host}", argv, enter, **environment)

    def kill(self, host: int) -> None:
        """The node is gone: all its processes at once."""
        for pid in _ip("netns", "pids", self.names[host]).split():
            kill(int(pid))

    def cut(self, whole: bool = False) -> None:
        """The link; with `whole` it is mended."""
        _ip("-n", self.names[0], "link", "set", "veth-a", "up" if whole else "down")


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def children(pid: int) -> dict[int, int]:
    """RANK -> pid of the ranks that the launcher `pid` has started and that live."""
    ranks = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                environment = (entry / "environ").read_bytes().split(b"\0")
                ranks |= {
                    int(word[5:]): int(entry.name)
                    for word in environment
                    if word.startswith(b"RANK=")
                }
    return ranks


class Training:
    """One command under launch/torchrun.sh, with its output in `folder`/log.

    Args:
        folder: Of its own.
        argv: A verb and its flags.
        prefix: Words before the command: `ip netns exec …`.
        environment: Of launch/torchrun.sh: NPROC, DIST_RUN_ID …
    """

    def __init__(
        self, folder: Path, argv: list[str], prefix: tuple[str, ...] = (), **environment: str
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.log = folder, folder / "log"
        # torchrun starts its workers with $PYTHON_EXEC -u -m <package> …
        watched = Path(environment.get(STEPS, folder)) / "watched.sh"
        watched.write_text(
            f'#!/bin/sh\nshift 3\nexec "{sys.executable}" -u -m tests.support.injury "$@"\n'
        )
        watched.chmod(0o755)
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith(OF_A_LAUNCHER)
        }
        self.environment = inherited | {
            "PYTHON": sys.executable,
            "PYTHON_EXEC": str(watched),
            "DIST_RUN_ID": folder.name,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            STEPS: str(folder),
            **environment,
        }
        self.command = [*prefix, "bash", str(PROJECT / "launch" / "torchrun.sh"), *argv]

    def __enter__(self) -> Training:
        return self.start()

    def __exit__(self, *_: object) -> None:
        for pid in [*self.ranks().values(), self.launcher.pid]:
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        self.launcher.wait()

    def start(self) -> Training:
        """Also again, as a scheduler does."""
        with self.log.open("a") as log:
            self.launcher = subprocess.Popen(
                self.command, env=self.environment, cwd=PROJECT, stdout=log, stderr=log
            )
        return self

    def ranks(self) -> dict[int, int]:
        return children(self.launcher.pid)

    def steps(self, rank: int = 0) -> list[Step]:
        path = Path(self.environment[STEPS], f"steps.{rank}")
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        fields = [line.split() for line in lines if line.endswith("\n")]
        return [Step(float(at), life, event, int(step)) for at, life, event, step in fields]

    def wait(self, until: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not until():
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(
                    f"ended with {self.launcher.poll()}, or too "
                    f"slow:\n{self.log.read_text()[-3000:]}"
                )
            time.sleep(0.01)

    def reach(self, step: int, timeout_s: float = 60.0) -> Step:
        """Wait until rank 0 has done `step`."""
        self.wait(lambda: bool((steps := self.steps()) and steps[-1].step >= step), timeout_s)
        return self.steps()[-1]

    def end(self, timeout_s: float = 120.0) -> int:
        """Wait for the launcher's end; its exit code."""
        return self.launcher.wait(timeout_s)


def watched(argv: list[str]) -> int:
    """One rank's command, its steps written down."""
    from dist_template.cluster import signals

    signals.listen()
    from dist_template.lazy import without_collections

    with without_collections():
        import lightning as L

        from dist_template.cli import fit as cli
        from tests.support.line import command

    class Watch(L.Callback):
        """Before all other callbacks: a step is done, and not yet saved."""

        def __init__(self) -> None:
            path = Path(os.environ[STEPS], f"steps.{os.environ['RANK']}")
            self.file = path.open("a", buffering=1)
            self.step = -1

        def note(self, event: str, step: int) -> None:
            self.step = step
            self.file.write(f"{time.time():.3f} {os.getpid()} {event} {step}\n")

        def on_train_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
            if self.step < 0:
                self.note("batch", trainer.global_step)

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
            if trainer.global_step != self.step:
                self.note("step", trainer.global_step)
                time.sleep(float(os.environ.get(STEP_S, "0")))

    build = cli.CLI.instantiate_trainer

    def instantiate_trainer(self: Any, **options: Any) -> L.Trainer:
        trainer: Any = build(self, **options)
        trainer.callbacks.insert(0, Watch())
        return trainer

    cli.CLI.instantiate_trainer = instantiate_trainer
    code = command(argv)
    signals.ignore()
    return code


if __name__ == "__main__":
    sys.exit(watched(sys.argv[1:]))
