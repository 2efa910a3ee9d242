"""Hurts a training under launch/torchrun.sh, which a user starts too, and follows how it continues.

A callback of the training, `Watch`, writes each step down."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil
from lightning.pytorch import Callback

from tests import PROJECT
from tests.support.waiting import LIMIT_S, until

STEPS = "INJURY_STEPS"  # the folder where rank 0 writes its steps down
OF_A_LAUNCHER = ("DIST_", "TORCHELASTIC", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE")
OF_A_LAUNCHER += ("NODE_RANK", "SLURM_", "INJURY")


class Step(NamedTuple):
    """An optimizer step that rank 0 finished; the first of a life is the one it starts from."""

    at: float  # time.time()
    life: str  # the process's number
    step: int


class Watch(Callback):
    """Lightning calls it before all that save: a step is done, and not yet saved."""

    step = -1

    def note(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.is_global_zero and trainer.global_step != self.step:
            self.step = trainer.global_step
            with Path(os.environ[STEPS], "steps").open("a") as file:
                file.write(f"{time.time():.3f} {os.getpid()} {self.step}\n")

    on_train_batch_start = on_train_batch_end = note


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


def corrupt(checkpoint: Path, chance: random.Random) -> str:
    """Flips one bit of one of its files, or truncates the file; returns what was done."""
    files = [file for file in sorted(checkpoint.rglob("*")) if file.is_file()]
    path = chance.choice([file for file in files if file.stat().st_size])
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    if is_flipped := chance.random() < 0.5:
        data[at] ^= 1 << chance.randrange(8)
    path.write_bytes(data if is_flipped else data[:at])
    return f"{path.name}: {'a bit of' if is_flipped else 'truncated at'} byte {at}"


class TwoHosts:
    """Two network namespaces on one link; each has this and its loopback. Needs root and `ip`."""

    names = ("injury-a", "injury-b")
    links = ("veth-a", "veth-b")
    addresses = ("10.77.0.1", "10.77.0.2")

    def __enter__(self) -> Self:
        self.__exit__()
        for name in self.names:
            _ip(f"netns add {name}")
        (a, b), (link_a, link_b) = self.names, self.links
        _ip(f"link add {link_a} netns {a} type veth peer {link_b} netns {b}")
        for name, address, link in zip(self.names, self.addresses, self.links, strict=True):
            _ip(f"-n {name} address add {address}/24 dev {link}")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link set {link} up")
        return self

    def __exit__(self, *_: object) -> None:
        for host, name in enumerate(self.names):
            if Path("/run/netns", name).exists():
                self.kill(host)
                _ip(f"netns delete {name}")

    def training(self, host: int, folder: Path, argv: list[str], **environment: str) -> "Training":
        """One node's launcher, not yet started; host 0 is the rendezvous's."""
        environment |= {"NPROC": "1", "RDZV_ENDPOINT": f"{self.addresses[0]}:29400"}
        environment |= {"RDZV_CONF": f"is_host={'false' if host else 'true'}"}
        environment |= {"LOCAL_ADDR": self.addresses[host], STEPS: str(folder)}
        environment |= {"GLOO_SOCKET_IFNAME": self.links[host]}
        enter = ("ip", "netns", "exec", self.names[host])
        return Training(folder / f"host{host}", argv, enter, **environment)

    def kill(self, host: int) -> None:
        for pid in _ip(f"netns pids {self.names[host]}").split():
            kill(int(pid))

    def cut(self, whole: bool = False) -> None:
        """Cuts the link; with `whole`, mends it."""
        _ip(f"-n {self.names[0]} link set {self.links[0]} {'up' if whole else 'down'}")


def _ip(words: str) -> str:
    command = ["ip", *words.split()]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Training:
    """One command under launch/torchrun.sh, with its output in `folder`/log; `prefix` are words
    before the command (`ip netns exec …`), `environment` is NPROC, DIST_RUN_ID …"""

    def __init__(
        self, folder: Path, argv: list[str], prefix: tuple[str, ...] = (), **environment: str
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.log = folder, folder / "log"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(OF_A_LAUNCHER)}
        inherited |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHON": sys.executable}
        own = {"DIST_RUN_ID": folder.name, STEPS: str(folder)}
        self.environment = inherited | own | environment
        watched = f"--trainer.callbacks+={__name__}.Watch"
        self.command = [*prefix, "bash", f"{PROJECT}/launch/torchrun.sh", *argv, watched]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        for pid in [*self.ranks().values(), self.launcher.pid]:
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        self.launcher.wait()

    def start(self) -> Self:
        """Starts the command, also again, as a scheduler does."""
        with self.log.open("a") as log:
            options: Any = {"env": self.environment, "stdout": log, "stderr": log}
            self.launcher = subprocess.Popen(self.command, cwd=PROJECT, **options)
        return self

    def ranks(self) -> dict[int, int]:
        """RANK -> pid of the living ranks that the launcher has started."""
        found: dict[int, int] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.launcher.pid).children():
                with contextlib.suppress(psutil.Error, KeyError):
                    found[int(process.environ()["RANK"])] = process.pid
        return found

    def steps(self) -> list[Step]:
        path = Path(self.environment[STEPS], "steps")
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        fields = [line.split() for line in lines if line.endswith("\n")]
        return [Step(float(at), life, int(step)) for at, life, step in fields]

    def wait(self, condition: Callable[[], bool], timeout_s: float = LIMIT_S) -> None:
        def said() -> str:
            return f"ended with {self.launcher.poll()}:\n{self.log.read_text()[-3000:]}"

        def happens() -> bool:
            assert self.launcher.poll() is None or condition(), said()
            return condition()

        until(happens, said, timeout_s, poll_s=0.01)

    def reach(self, step: int, timeout_s: float = LIMIT_S) -> None:
        """Waits until rank 0 has done `step`."""
        self.wait(lambda: bool((steps := self.steps()) and steps[-1].step >= step), timeout_s)

    def end(self, timeout_s: float = LIMIT_S) -> int:
        return self.launcher.wait(timeout_s)
