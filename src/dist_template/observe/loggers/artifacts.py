"""Uploads checkpoints to W&B in the background."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from ...errors import reason

UPLOAD_S = 6 * 3600  # the longest time that one upload may take


class Uploads:
    """Uploads one checkpoint at a time in a daemon thread; only the newest of each kind waits."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Any, Path]] = {}  # kind -> W&B run, checkpoint
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, run: Any, path: Path, kind: str) -> None:
        """Queues the checkpoint folder `path` as a version of the artifact `<kind>-<run id>`."""
        with self._lock:
            self._waiting[kind] = (run, path)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
                self._thread.start()

    def wait(self, seconds: float) -> None:
        if (thread := self._thread) is not None:
            thread.join(seconds)
            if thread.is_alive():
                rank_zero_warn(
                    f"W&B has not received all checkpoints within {seconds:g} s; they stay on disk"
                )

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                kind, (run, path) = self._waiting.popitem()
            try:
                _upload(run, path, kind)
            except Exception as error:  # the checkpoint itself is safe
                rank_zero_warn(f"{path.name} was not uploaded to W&B: {reason(error)}")


def _upload(run: Any, path: Path, kind: str) -> None:
    """Uploads hard links, so that the checkpoint may be deleted during the upload."""
    import wandb

    links = path.parent / ".uploads"
    shutil.rmtree(links, ignore_errors=True)  # of a killed run
    shutil.copytree(path, links, copy_function=os.link)
    artifact = wandb.Artifact(f"{kind}-{run.id}", type="model", metadata={"checkpoint": path.name})
    artifact.add_dir(str(links), policy="immutable", skip_cache=True)  # without a copy
    run.log_artifact(artifact, aliases=["latest", path.name.removesuffix(".ckpt")])
    artifact.wait(UPLOAD_S)
    shutil.rmtree(links, ignore_errors=True)
