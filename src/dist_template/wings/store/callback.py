"""Uploads committed checkpoints and a run's files to `run.store`, in the background of training."""

import concurrent.futures
import threading
import time
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch.distributed as dist
from lightning.pytorch import Callback

from ... import weights
from ...callbacks.console import console_of
from ...cluster.watchdog import WATCHDOG
from ...errors import Ended, InputError, reason
from ...model.any_module import metrics_of
from .local import CHECKPOINT, CHECKPOINTS, MANIFEST
from .remote import Remote, StoreError, retried

SMALL = 64 * 2**20  # bytes of the largest file of a run that is uploaded
SKIPPED = {"lock.json", "wandb"}


class Store(Callback):
    """Uploads each committed checkpoint and the run's files to `run.store`, in the background.

    Every rank uploads the files that it has hashed; rank 0 writes the manifest when all are in the store. The next
    checkpoint waits for the upload of the one before. If the store fails, training continues.

    Args:
        address: Folder of the runs in the store; `run.store` sets it. null: off.
        keep: How many of the newest checkpoints to keep in the store, at least 1. Of `best_checkpoint`, those that are
            kept on the disk.
        every_s: Seconds between two uploads of the run's files, at log steps.
        timeout_s: Seconds for which a failed upload of a checkpoint is tried again.
        folder: The run's folder.
    """

    def __init__(
        self,
        address: str | None = None,
        keep: int = 2,
        every_s: float = 60.0,
        timeout_s: float = 600.0,
        folder: str = "{run}",
    ) -> None:
        for key, value, least in (("keep", keep, 1), ("every_s", every_s, 0), ("timeout_s", timeout_s, 0)):
            if not value >= least:
                raise InputError(f"store.{key} is {value}; give {least} or more")
        self.address, self.keep, self.every_s, self.timeout_s = address, keep, every_s, timeout_s
        self.folder = Path(folder)
        self.behind, self.failed, self.waited_s = 0, 0, 0.0  # checkpoints; uploads in a row; seconds in all
        self._run: Remote | None = None
        self._group: dist.ProcessGroup | None = None
        self._sending: concurrent.futures.Future[None] | None = None
        self._files: concurrent.futures.Future[None] | None = None
        self._last = 0.0  # time of the last upload of the run's files

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not self.address or stage != "fit" or trainer.fast_dev_run or self._run is not None:
            return
        self.folder = Path(str(self.folder).replace("{run}", trainer.default_root_dir))
        self._run, self._trainer = Remote(self.address, "store.address") / self.folder.name, trainer
        self.checkpoint_store = (self._run / CHECKPOINTS).address  # an entry of the manifests
        self._thread = concurrent.futures.ThreadPoolExecutor(2, "store")
        if trainer.is_global_zero:
            UPLOADED[self.folder] = RunFiles(self._run, self.folder)
        if dist.is_initialized():
            timeout = timedelta(seconds=self.timeout_s + 600)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    # ---- checkpoints -------------------------------------------------------------------------

    def on_commit(self, path: Path, manifest: str, own: dict[str, list[int]]) -> None:
        """Starts to upload a checkpoint, of which this rank has hashed the files `own`; on every rank, in the thread
        that saves, after the upload before."""
        if self._run is not None:
            self._settle()
            self.behind += 1
            self._sending = self._thread.submit(self._send, path, manifest, [*own])

    def _settle(self) -> None:
        """Waits until the upload before has finished or failed."""
        begun = time.monotonic()
        while self._sending is not None and not self._sending.done():
            if not self.waited_s:
                self._report("the next checkpoint waits until the one before is in the store, which is slow")
            concurrent.futures.wait([self._sending], 1.0)
            if threading.current_thread() is threading.main_thread():
                WATCHDOG.keep_alive()
            self.waited_s += time.monotonic() - begun
            begun = time.monotonic()

    def _send(self, path: Path, manifest: str, files: list[str]) -> None:
        assert self._run is not None
        try:
            why = self._sent(self._run / CHECKPOINTS / path.name, path, manifest, files)
        except Exception as error:  # gloo's, if a rank is gone
            why = reason(error)
        if why:
            self.failed += 1
            self._report(f"{path.name} is not in the store: {why}; training continues")
        else:
            self.behind = self.failed = 0

    def _sent(self, remote: Remote, path: Path, manifest: str, files: list[str]) -> str | None:
        """Uploads this rank's files, then rank 0 the manifest. Returns why a rank failed, or None. Collective."""
        until, is_first = time.monotonic() + self.timeout_s, self._trainer.is_global_zero

        def forget() -> None:  # what training has replaced, or a killed upload has left
            (remote / MANIFEST).remove()
            remote.remove()

        def upload() -> None:
            for file in files:
                retried(lambda file=file: (remote / file).put(path / file), until)

        def conclude() -> None:
            UPLOADED[self.folder].upload(until)
            retried(lambda: (remote / MANIFEST).write(manifest.encode()), until)
            self._retain(path)

        steps = [(is_first, forget), (True, upload), (is_first, conclude)]
        for is_mine, step in steps:
            why = None
            try:
                if is_mine:
                    step()
            except (StoreError, OSError) as error:
                why = f"rank {self._trainer.global_rank}: {reason(error)}"
            if whys := [*filter(None, weights.from_all_ranks(why, self._group))]:
                return whys[0]
        return None

    def _retain(self, newest: Path) -> None:
        """Deletes older checkpoints, those after a step to which training went back, and `best-` ones that the disk has
        no more; each manifest first."""
        assert self._run is not None
        checkpoints, kept = self._run / CHECKPOINTS, 0
        for name in reversed((self._run / CHECKPOINTS).names()):
            is_wanted = not CHECKPOINT.fullmatch(name) or name == newest.name
            if name.startswith("best"):
                is_wanted = is_wanted or (newest.parent / name).exists()
            elif not newest.name.startswith("step"):
                is_wanted = True
            elif name <= newest.name and kept < self.keep and (checkpoints / name / MANIFEST).read():
                is_wanted, kept = True, kept + 1
            if not is_wanted:
                (checkpoints / name / MANIFEST).remove()
                (checkpoints / name).remove()

    # ---- the run's files, and the end ----------------------------------------------------------

    def before_log_step(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._run is not None:
            metrics = metrics_of(module)
            metrics.put("health/store_behind", self.behind)
            metrics.put("health/store_failed", self.failed)
            metrics.put("health/store_wait_s", self.waited_s)

    def on_log_step(self, trainer: L.Trainer, module: L.LightningModule, metrics: dict[str, float]) -> None:
        is_busy = self._files is not None and not self._files.done()
        if self.folder in UPLOADED and not is_busy and time.monotonic() - self._last >= self.every_s:
            self._last = time.monotonic()
            self._files = self._thread.submit(self._send_files)

    def _send_files(self) -> None:
        try:
            UPLOADED[self.folder].upload()
        except (StoreError, OSError) as error:
            self.failed += 1
            self._report(f"the run's files are not in the store: {reason(error)}; training continues")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._settle()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Ended) or trainer.world_size == 1:  # else a rank may be gone
            self._settle()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._run is not None:
            self._settle()
            self._thread.shutdown()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._run = self._group = None

    def _report(self, sentence: str) -> None:
        if self._trainer.is_global_zero:
            text, console = f"store: {sentence}", console_of(self._trainer)
            console.write(text) if console else print(text, flush=True)


class RunFiles:
    """The small files of a run, in its folder and in the store."""

    def __init__(self, remote: Remote, folder: Path) -> None:
        self._remote, self._folder = remote, folder
        self._sent: dict[str, tuple[int, int]] = {}  # name: time and size when it was uploaded
        self._lock = threading.Lock()

    def upload(self, until: float = 0.0) -> None:
        """Uploads the files that have changed; one that fails is tried again next time, or until a time."""
        with self._lock:
            for file in sorted(self._folder.rglob("*")):
                name = file.relative_to(self._folder)
                is_skipped = any(part.startswith(".") or part.endswith(".ckpt") for part in name.parts)
                if is_skipped or SKIPPED & {*name.parts} or not file.is_file() or file.stat().st_size > SMALL:
                    continue
                state = (file.stat().st_mtime_ns, file.stat().st_size)
                if self._sent.get(str(name)) != state:
                    remote, content = self._remote / name.as_posix(), file.read_bytes()
                    retried(lambda remote=remote, content=content: remote.write(content), until)
                    self._sent[str(name)] = state


UPLOADED: dict[Path, RunFiles] = {}  # by the runs' folders, on rank 0
