"""Stores for tests: an S3 server on loopback, and nodes of this machine that share no disk."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_template.wings.values import free_port
from tests.support.injury import STEPS, Training

KEYS = {"AWS_ACCESS_KEY_ID": "the-key-id", "AWS_SECRET_ACCESS_KEY": "the-secret-key"}
KEYS |= {"AWS_DEFAULT_REGION": "us-east-1"}
BUCKET = "bucket"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket on a server of this process, for started processes too: s3://bucket/…."""
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem(use_listings_cache=False)
    files.mkdir(BUCKET)
    yield files
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


class Nodes:
    """Two launchers in mount namespaces: each has a folder of its own as `root`. Needs root."""

    def __init__(self, folder: Path, root: Path, argv: list[str], **environment: str) -> None:
        self.disks = [folder / "disk0", folder / "disk1"]
        self.root, self.folder = root, folder
        root.mkdir(parents=True, exist_ok=True)
        options = {"NNODES": "2", "RDZV_ENDPOINT": f"127.0.0.1:{free_port()}", "NPROC": "1"}
        options |= {"DIST_RUN_ID": "nodes", STEPS: str(folder), **environment}
        self.trainings = []
        for number, disk in enumerate(self.disks):
            disk.mkdir(parents=True)
            mount = f'mount --bind {disk} {root} && exec "$@"'
            prefix = ("unshare", "-m", "sh", "-c", mount, "node")
            options |= {"RDZV_CONF": f"is_host={'false' if number else 'true'}"}
            self.trainings.append(Training(folder / f"node{number}", argv, prefix, **options))

    def __enter__(self) -> Nodes:
        for training in self.trainings:
            training.start()
        return self

    def __exit__(self, *_: object) -> None:
        for training in self.trainings:
            training.__exit__()

    def lose(self, *numbers: int) -> None:
        """Empties the disks of nodes that have ended."""
        for number in numbers:
            shutil.rmtree(self.disks[number])
            self.disks[number].mkdir()


def can_mount() -> bool:
    command = ["unshare", "-m", "true"]
    return bool(shutil.which("unshare")) and not subprocess.run(command, check=False).returncode
