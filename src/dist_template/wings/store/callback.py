"""Uploads committed checkpoints and a run's files to `run.store`, in the background of training."""

import concurrent.futures
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch import Callback

from ... import weights
from ...callbacks.console import console_of
from ...cluster.watchdog import WATCHDOG
from ...errors import Ended, reason
from ...model.any_module import metrics_of
from .remote import CHECKPOINTS, MANIFEST, UPLOADS, Remote, StoreError, retried

MOST = 64 * 2**20  # bytes of a file of a run; larger ones are not uploaded
SKIPPED = re.compile(r"(.*/)?(\..*|lock\.json|wandb/.*|[^/]*\.ckpt/.*)")


class Store(Callback):
    """Uploads each committed checkpoint and the run's files to `run.store`, in the background.

    Every rank uploads the files that it has hashed; rank 0 writes the manifest when all are in the store. The next
    checkpoint waits for the upload of the one before. If the store fails, training continues.

    Args:
        address: Folder of the runs in the store; `run.store` sets it. null: off.
        every_s: Seconds between two uploads of the run's files, at log steps.
        folder: The run's folder.
    """

    timeout_s = 600.0  # for which the upload of a checkpoint is tried again

    def __init__(self, address: str | None = None, every_s: float = 60.0, folder: str = "{run}") -> None:
        self.address, self.every_s, self.folder = address, every_s, Path(folder)
        self.behind, self.failed, self.waited_s = 0, 0, 0.0  # checkpoints; failures in a row; seconds in all
        self._checkpoints: Remote | None = None
        self._group: dist.ProcessGroup | None = None
        self._jobs: dict[str, concurrent.futures.Future[None]] = {}
        self._last = 0.0  # time of the last upload of the run's files

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        if not self.address or stage != "fit" or trainer.fast_dev_run:
            return
        self.folder = Path(str(self.folder).replace("{run}", trainer.default_root_dir))
        run, self._trainer = Remote(self.address) / self.folder.name, trainer
        self._checkpoints = run / CHECKPOINTS
        self.checkpoint_store = self._checkpoints.address  # an entry of the manifests
        self._threads = concurrent.futures.ThreadPoolExecutor(2, "store")
        if trainer.is_global_zero:
            UPLOADS[self.folder] = partial(upload_files, run, self.folder, {}, threading.Lock())
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s + 600))

    # ---- checkpoints -------------------------------------------------------------------------

    def on_commit(self, path: Path, own: dict[str, list[int]]) -> None:
        """Starts the upload of a checkpoint, in which this rank has hashed the files `own`, after the upload before; on
        every rank, in the thread that saves."""
        if self._checkpoints is not None:
            self._settle()
            self.behind += 1
            upload = partial(self._upload, self._checkpoints / path.name, path, [*own])
            self._jobs["checkpoint"] = self._threads.submit(self._try, path.name, upload)

    def _settle(self) -> None:
        """Waits until the upload before has finished or failed."""
        job, begun = self._jobs.get("checkpoint"), time.monotonic()
        if job is None or job.done():
            return
        if not self.waited_s:
            self._report("waiting for the upload of the last checkpoint")
        while concurrent.futures.wait([job], 1.0).not_done:
            if threading.current_thread() is threading.main_thread():
                WATCHDOG.keep_alive()
        self.waited_s += time.monotonic() - begun

    def _try(self, what: str, upload: Callable[[], None]) -> None:
        try:
            upload()
        except Exception as error:  # of the store, the disk, or gloo if a rank is gone
            self.failed += 1
            self._report(f"{what} is not in the store: {reason(error)}; training continues")

    def _upload(self, remote: Remote, path: Path, files: list[str]) -> None:
        """Uploads this rank's files, then rank 0 the manifest. Collective; raises StoreError on all ranks."""
        rank, until = self._trainer.global_rank, time.monotonic() + self.timeout_s
        phases: list[list[Callable[[], None]]] = [[], [partial((remote / file).put, path / file) for file in files], []]
        if rank == 0:
            phases[0] = [partial(remove, remote)]  # what training has replaced, or a killed upload has left
            phases[2] = [UPLOADS[self.folder], partial((remote / MANIFEST).put, path / MANIFEST)]
            phases[2].append(partial(self._retain, path))
        for calls in phases:
            why = ""
            try:
                for call in calls:
                    retried(call, until)
            except (StoreError, OSError) as error:
                why = f"rank {rank}: {error}"
            for failure in filter(None, weights.from_all_ranks(why, self._group)):
                raise StoreError(failure)
        self.behind = self.failed = 0

    def _retain(self, newest: Path) -> None:
        """Deletes checkpoints that the disk has no more, and what killed uploads have left."""
        assert self._checkpoints is not None
        for name in self._checkpoints.names():
            if name[:4] == newest.name[:4] and not (newest.parent / name).exists():  # best, or step
                remove(self._checkpoints / name)

    # ---- the run's files, and the end ----------------------------------------------------------

    def before_log_step(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._checkpoints is not None:
            for name in ("behind", "failed", "waited_s"):
                metrics_of(module).put(f"health/store_{name}", getattr(self, name))

    def on_log_step(self, trainer: L.Trainer, module: L.LightningModule, metrics: dict[str, float]) -> None:
        is_due = time.monotonic() - self._last >= self.every_s
        if self.folder in UPLOADS and is_due and ("files" not in self._jobs or self._jobs["files"].done()):
            self._last = time.monotonic()
            self._jobs["files"] = self._threads.submit(self._try, "a file of the run", UPLOADS[self.folder])

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._settle()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Ended) or trainer.world_size == 1:  # else a rank may be gone
            self._settle()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._checkpoints is not None and stage == "fit":
            self._threads.shutdown()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._checkpoints = self._group = None

    def _report(self, sentence: str) -> None:
        if self._trainer.is_global_zero:
            console = console_of(self._trainer)
            show = console.write if console else partial(print, flush=True)
            show(f"store: {sentence}")


def remove(checkpoint: Remote) -> None:
    (checkpoint / MANIFEST).remove()  # first: without it, the rest is no checkpoint
    checkpoint.remove()


def upload_files(run: Remote, folder: Path, sent: dict[str, tuple[int, int]], lock: threading.Lock) -> None:
    """Uploads the files of a run that have changed; `sent` has the time and size of what the store has."""
    with lock:
        for file in sorted(folder.rglob("*")):
            name = file.relative_to(folder).as_posix()
            if SKIPPED.fullmatch(name) or not file.is_file():
                continue
            state = (file.stat().st_mtime_ns, file.stat().st_size)
            if state[1] <= MOST and sent.get(name) != state:
                (run / name).write(file.read_bytes())
                sent[name] = state
