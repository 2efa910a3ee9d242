"""Uploads committed checkpoints and a run's files to `run.store`, in the background of training.

1  At the start, rank 0 locks the run in the store (lock.py).
2  A checkpoint is committed on the disk: each rank uploads the files that it has hashed, in a
   thread. When all ranks have, rank 0 uploads the manifest, which makes the checkpoint valid, and
   removes old ones.
3  At log steps, rank 0 uploads the run's small files that have changed.
4  At the end, all ranks wait for the last upload."""

import atexit
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import copy
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch.distributed as dist

from ...callbacks.console import console_of
from ...checkpoint.manifest import STORE
from ...cluster.watchdog import WATCHDOG
from ...errors import Ended, Exit, InputError, reason
from ...model.any_module import metrics_of
from ...processes import broadcast, from_all_ranks
from ...ranges import NonNegativeFloat, PositiveInt
from ...run_callback import RunCallback
from .hooks import DOWN_S, NEWEST, missed, text_here, time_of
from .lock import LOCKS, StoreLock
from .remote import CHECKPOINTS, MANIFEST, UPLOADS, Remote, StoreDown

MOST = 64 * 2**20  # bytes of a file of a run; larger ones are not uploaded
SKIPPED = re.compile(r"(.*/)?(\..*|lock\.json|wandb/.*|[^/]*\.ckpt/.*)")


class Store(RunCallback):
    """Uploads each committed checkpoint and the run's files to `run.store`, in the background.

    Every rank uploads the files that it has hashed; rank 0 uploads the manifest when all are in the
    store. The next checkpoint waits for the upload of the one before. If the store fails, training
    continues.

    Args:
        address: Folder of the runs in the store; `run.store` sets it. null: off.
        keep: How many of the newest checkpoints to keep in the store, at least 1. Best ones are
            kept as on the disk.
        every_s: Seconds between two uploads of the run's files, at log steps.
        folder: The run's folder."""

    timeout_s = 600.0  # for which the upload of a checkpoint is tried again

    def __init__(
        self,
        address: str | None = None,
        keep: PositiveInt = 2,
        every_s: NonNegativeFloat = 60.0,
        folder: str = "{run}",
    ) -> None:
        self.address, self.keep, self.every_s, self.folder = address, keep, every_s, Path(folder)
        self.behind = 0  # committed checkpoints that are not in the store
        self.failed = 0  # uploads in a row
        self.waited_s = 0.0  # in all
        self._run: Remote | None = None
        self._group: dist.ProcessGroup | None = None
        self._upload: Future[None] | None = None  # of the last checkpoint
        self._last = 0.0  # time of the last upload of the run's files

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        if not self.address or stage != "fit" or trainer.fast_dev_run:
            return
        run = self._run = Remote(self.address) / self.folder.name
        self._trainer = trainer
        self._lock_run(run)
        self._thread = ThreadPoolExecutor(1, "store")
        if trainer.is_global_zero:
            UPLOADS[self.folder] = partial(upload_files, run, self.folder, {})
        if dist.is_initialized():
            timeout = timedelta(seconds=self.timeout_s + 600)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def _lock_run(self, run: Remote) -> None:
        """Locks the run in the store, on rank 0. Collective; raises InputError on all ranks if
        another launch has it, and Ended, for a relaunch, if the store is down or another launch
        has stored a checkpoint since this one looked."""
        why, is_for_relaunch = None, False
        if self._trainer.is_global_zero:
            earlier = LOCKS.pop(self.folder, None)  # of a training of this process
            if earlier is not None:
                earlier.release()
            waiting = copy(run)
            waiting.until, waiting.waits_for_answers = time.monotonic() + DOWN_S, True
            try:
                lock = StoreLock(waiting)
                why = lock.take()
                if why is None:
                    LOCKS[self.folder] = lock
                    atexit.register(lock.release)  # if no hook at the end is called
                    newer = missed(waiting)
                    if newer:
                        why, is_for_relaunch = newer, True
            except InputError as error:
                why, is_for_relaunch = str(error), isinstance(error, StoreDown)
        why, is_for_relaunch = broadcast((why, is_for_relaunch))
        if why and is_for_relaunch:
            raise Ended(Exit.REQUEUE, why)
        if why:
            raise InputError(why)

    # ---- checkpoints -------------------------------------------------------------------------

    def manifest_entries(self) -> dict[str, str]:
        if self._run is None:
            return {}
        return {STORE: f"{self._run.address}/{CHECKPOINTS}"}

    def on_commit(self, path: Path, hashed: dict[str, list[int]]) -> None:
        """Starts to upload the files of a checkpoint that this rank has hashed, when the upload
        before has ended; on every rank, in the thread that saves."""
        if self._run is not None:
            self.settle()
            self.behind += 1
            self._run.until = time.monotonic() + self.timeout_s
            upload = partial(self._upload_checkpoint, self._run / CHECKPOINTS, path, list(hashed))
            self._upload = self._thread.submit(self._try, path.name, upload)

    def settle(self) -> None:
        """Waits until the upload of the last checkpoint has finished or failed."""
        upload = self._upload
        if upload and not upload.done() and not self.waited_s:
            self._report("waiting for the upload of the last checkpoint")
        while upload and not upload.done():
            begun = time.monotonic()
            wait([upload], 1.0)
            self.waited_s += time.monotonic() - begun
            WATCHDOG.keep_alive()

    def _try(self, what: str, upload: Callable[[], None]) -> None:
        try:
            upload()
        except Exception as error:  # of the store, the disk, or gloo if a rank is gone
            self.failed += 1
            self._report(f"{what} is not in the store: {reason(error)}; training continues")

    def _upload_checkpoint(self, checkpoints: Remote, path: Path, files: list[str]) -> None:
        """Uploads this rank's files, then rank 0 the manifest. Collective; raises InputError on all
        ranks."""
        remote, why = checkpoints / path.name, ""
        try:
            for file in files:
                (remote / file).put(path / file)
        except (InputError, OSError) as error:
            why = f"rank {self._trainer.global_rank}: {error}"
        for failure in filter(None, from_all_ranks(why, self._group)):
            raise InputError(failure)
        if self._trainer.is_global_zero:
            if self.folder in LOCKS and not LOCKS[self.folder].is_held():
                raise InputError("another launch has taken the run over")
            UPLOADS[self.folder]()
            (remote / MANIFEST).put(path / MANIFEST)
            run = checkpoints.address.removesuffix(f"/{CHECKPOINTS}")
            NEWEST[run] = time_of(text_here(path / MANIFEST))
            retain(checkpoints, path, self.keep)
        self.behind = self.failed = 0

    # ---- the run's files, and the end ----------------------------------------------------------

    def before_log_step(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._run is not None:
            for name in ("behind", "failed", "waited_s"):
                metrics_of(module).put(f"health/store_{name}", getattr(self, name))

    def on_log_step(
        self, trainer: L.Trainer, module: L.LightningModule, metrics: dict[str, float]
    ) -> None:
        if self.folder in UPLOADS and time.monotonic() - self._last >= self.every_s:
            self._last = time.monotonic()
            self._thread.submit(self._try, "a file of the run", UPLOADS[self.folder])

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, Ended) or trainer.world_size == 1:  # else a rank may be gone
            self.settle()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.settle()
        if self._run is not None:
            self._thread.shutdown()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._run = self._group = None

    def _report(self, sentence: str) -> None:
        if not self._trainer.is_global_zero:
            return
        console = console_of(self._trainer)
        if console is None:
            print(f"store: {sentence}")
        else:
            console.write(f"store: {sentence}")


def retain(checkpoints: Remote, newest: Path, keep: int) -> None:
    """Deletes checkpoints of the kind of `newest`, which was just uploaded. Of steps, the newest
    `keep` are kept, and none after `newest`: training went back. Of best ones, those are kept that
    are still on the disk. Remnants of interrupted uploads are deleted."""
    sizes = checkpoints.sizes()
    kind = newest.name[:4]  # "step" or "best"
    names = sorted({path.split("/")[0] for path in sizes if path.startswith(kind)}, reverse=True)
    complete = [name for name in names if f"{name}/{MANIFEST}" in sizes and name <= newest.name]
    if kind == "step":
        kept = complete[:keep]
    else:
        kept = [name for name in names if (newest.parent / name).exists()]
    for name in names:
        if name not in kept:
            (checkpoints / name / MANIFEST).remove()  # first: without it, the rest is no checkpoint
            (checkpoints / name).remove()


def upload_files(run: Remote, folder: Path, sent: dict[str, tuple[int, int]]) -> None:
    """Uploads the files of a run that have changed; `sent` has the time and size of what the store
    has."""
    for name in sorted(_files_of(folder)):
        with TemporaryDirectory() as temporary:
            try:
                status = (folder / name).stat()
                state = (status.st_mtime_ns, status.st_size)
                if status.st_size > MOST or sent.get(name) == state:
                    continue
                copied = Path(shutil.copy(folder / name, temporary))  # training may write to it
            except FileNotFoundError:  # removed since it was listed
                continue
            (run / name).put(copied)
        sent[name] = state


def _files_of(folder: Path) -> Iterator[str]:
    """Yields the names of a run's files that are uploaded. Folders that are not, such as a
    checkpoint's that training removes meanwhile, are not entered."""
    for root, folders, files in os.walk(folder):
        here = Path(root).relative_to(folder)
        folders[:] = [each for each in folders if not SKIPPED.fullmatch(f"{here / each}/file")]
        for each in files:
            name = (here / each).as_posix()
            if not SKIPPED.fullmatch(name) and (folder / name).is_file():
                yield name
