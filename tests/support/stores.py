"""Stores for tests: an S3 server on loopback, a run that saves, nodes that share no disk."""

import json
import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from urllib.request import urlopen

import pytest

from dist_template.checkpoint import commit, manifest
from dist_template.wings.store import lock
from dist_template.wings.store.callback import Store
from dist_template.wings.values import free_port
from tests.support.injury import STEPS, Training

KEYS = {"AWS_ACCESS_KEY_ID": "the-key-id", "AWS_SECRET_ACCESS_KEY": "the-secret-key"}
KEYS["AWS_DEFAULT_REGION"] = "us-east-1"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server of this process with an empty s3://bucket, for started processes too."""
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    urlopen(f"{endpoint}/moto-api/reset", b"")  # moto keeps a process's objects
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem(use_listings_cache=False)
    files.mkdir("bucket")
    yield files
    server.stop()


class Saving:
    """A rank of a run that saves and uploads as a training, without a training."""

    def __init__(self, address: str, folder: Path, rank: int = 0) -> None:
        self.folder, self.rank, self.callback = folder, rank, Store(address, folder=str(folder))
        self.callback.timeout_s = lock.SETTLE_S = 0.0  # no other rank takes the lock at once
        self.trainer: Any = SimpleNamespace(fast_dev_run=False, callbacks=[self.callback])
        vars(self.trainer).update(is_global_zero=rank == 0, global_rank=rank)
        folder.mkdir(parents=True, exist_ok=True)
        self.callback.setup(self.trainer, self.trainer, "fit")

    def save(self, step: int, settles: bool = True) -> None:
        """Every rank writes a file with the step, rank 0 a second one."""
        path = self.folder / "checkpoints" / manifest.name(step)
        entries: dict[str, Any] = {"step": step}
        entries |= self.callback.manifest_entries()

        def write(folder: Path) -> None:
            (folder / f"{self.rank}").write_text(f"{step}" * 1000)
            if self.rank == 0:
                (folder / "meta.pt").write_text(f"{step}")
                (self.folder / "metrics.jsonl").write_text(json.dumps({"step": step}))

        commit.write_into(path, entries, write, trainer=self.trainer)
        if settles:
            self.callback.settle()


class Nodes:
    """Two launchers in mount namespaces: each has a folder of its own as `root`."""

    def __init__(self, folder: Path, root: Path, argv: list[str]) -> None:
        self.disks = [folder / "disk0", folder / "disk1"]
        self.trainings: list[Training] = []
        root.mkdir(parents=True, exist_ok=True)
        options = {"NNODES": "2", "RDZV_ENDPOINT": f"127.0.0.1:{free_port()}", "NPROC": "1"}
        options |= {"DIST_RUN_ID": "nodes", STEPS: str(folder)}
        for number, disk in enumerate(self.disks):
            disk.mkdir(parents=True)
            mount = f'mount --bind {disk} {root} && exec "$@"'
            options["RDZV_CONF"] = f"is_host={'false' if number else 'true'}"
            prefix = ("unshare", "-m", "sh", "-c", mount, "node")
            self.trainings.append(Training(folder / f"node{number}", argv, prefix, **options))

    def __enter__(self) -> Self:
        for training in self.trainings:
            training.start()
        return self

    def __exit__(self, *_: object) -> None:
        for training in self.trainings:
            training.__exit__()


def empty(*disks: Path) -> None:
    for disk in disks:
        shutil.rmtree(disk)
        disk.mkdir()


def can_mount() -> bool:
    command = ["unshare", "-m", "true"]
    return bool(shutil.which("unshare")) and not subprocess.run(command, check=False).returncode
