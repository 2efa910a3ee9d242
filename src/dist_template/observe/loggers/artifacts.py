"""Checkpoints go to WandB behind training's back."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from ...errors import reason

UPLOAD_S = 6 * 3600  # after so long an upload is given up, and its files are let go


class Uploads:
    """One upload at a time, in a thread; of what waits, only the newest of its kind is kept.

    An upload reads hard links, which take no room and outlive the checkpoint's own deletion.

    Args:
        folder: Where the links are, on the file system of the checkpoints. Emptied first: a killed run leaves some.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        self._waiting: dict[str, Path] = {}  # by kind
        self._turns: SimpleQueue[tuple[Any, str]] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        # A daemon, for the process must not wait for it: ThreadPoolExecutor's threads are waited for at the exit.
        threading.Thread(target=self._work, name="uploads", daemon=True).start()

    def begin(self, run: Any, path: Path, kind: str) -> None:
        """Upload the checkpoint in the folder `path` as a version of `<kind>-<run id>`, when it is its turn."""
        links = self.folder / path.name
        try:
            shutil.copytree(path, links, copy_function=os.link)
        except (OSError, shutil.Error) as error:  # no hard links there; or the same step is still on its way
            rank_zero_warn(f"{path.name} cannot be uploaded to WandB: {reason(error)}")
            return
        with self._lock:
            self._idle.clear()
            outdated = self._waiting.pop(kind, None)
            self._waiting[kind] = links
        if outdated is not None:
            shutil.rmtree(outdated, ignore_errors=True)
        self._turns.put((run, kind))

    def wait(self, seconds: float) -> None:
        """Until all are uploaded, or time is up."""
        if not self._idle.wait(seconds):
            rank_zero_warn(f"WandB has not taken all checkpoints within {seconds:g} s; they stay in the run's folder")

    def _work(self) -> None:
        while True:
            run, kind = self._turns.get()
            with self._lock:
                links = self._waiting.pop(kind, None)
            if links is not None:
                try:
                    self._upload(run, links, kind)
                except Exception as error:  # whatever the service says: the checkpoint itself is safe
                    rank_zero_warn(f"WandB did not take {links.name}: {reason(error)}")
                shutil.rmtree(links, ignore_errors=True)
            with self._lock:
                if not self._waiting:
                    self._idle.set()

    @staticmethod
    def _upload(run: Any, links: Path, kind: str) -> None:
        import wandb

        artifact = wandb.Artifact(f"{kind}-{run.id}", type="model", metadata={"checkpoint": links.name})
        artifact.add_dir(str(links), policy="immutable", skip_cache=True)  # it copies nothing, and hashes all
        run.log_artifact(artifact, aliases=["latest", links.name.removesuffix(".ckpt")])
        artifact.wait(UPLOAD_S)
