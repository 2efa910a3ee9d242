"""Writes checkpoints so that a kill leaves the one before valid; manifest.py verifies them.

    step00000040.ckpt/          a checkpoint: manifest.json and the files that the strategy wrote
    best-step00000040.ckpt/     the same
    .step00000040.ckpt.tmp/     is being written, or was left by a killed save
    .step00000040.ckpt.old/     is being deleted

torch's distributed format and DeepSpeed write into the folder that they are given. A save that is
killed halfway would leave new shards of some ranks and old shards of others, which load without an
error. Here all ranks write into a temporary folder. Its files are flushed to the disk and hashed,
and one rename turns it into the checkpoint.

All ranks must see the same folder; on several nodes it must be on a shared file system. With a
store, each node may have a folder on its own disk: its first rank creates and renames it, and the
manifest lists all nodes' files."""

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils.serialization import config as serialization

from .. import disks, processes
from ..cluster.watchdog import WATCHDOG
from ..compat.lightning import checkpoint_of, timeout_of
from ..errors import reason
from ..run_callback import run_callbacks
from . import manifest
from .formats import format_for
from .identity import KEY
from .manifest import FORMAT, MANIFEST, STORE, Files, crc32
from .plain_types import plain
from .protocol import Group

Entries = dict[str, object]  # of a manifest
T = TypeVar("T")


class SaveError(Exception):
    """A rank's disk refused a write. Raised on all ranks: no checkpoint was committed, and the ones
    before are kept."""


def save(trainer: L.Trainer, path: Path, **notes: object) -> None:
    """Commits the present state as `path`, with `notes` in its manifest. Collective; raises
    SaveError."""
    path, checkpoint = Path(processes.broadcast(str(path))), plain(checkpoint_of(trainer))
    entries = training_entries(trainer) | notes
    write_into(
        path,
        entries,
        lambda folder: trainer.strategy.save_checkpoint(checkpoint, folder),
        trainer=trainer,
    )


def write_into(
    path: Path,
    entries: Entries,
    write: Callable[[Path], object],
    group: Group = None,
    trainer: Any = None,
) -> None:
    """Commits what all ranks `write` into a temporary folder as `path`, then calls `on_commit` of
    callbacks with the path and the files that this rank has hashed. Collective in `group`."""
    ranks = [*range(processes.world_size(group))]
    if STORE in entries:  # each node may have a disk of its own
        ranks = disks.peers(path.parent, group)
        if processes.rank(group) == ranks[0]:
            _LED.add(path.parent)
    temporary = begin(path, group, ranks)
    failure = disk_error(lambda: write(temporary))
    hashed = finish(path, entries, failure, group, ranks)
    for callback in run_callbacks(trainer):
        callback.on_commit(path, hashed)


# folders, on a node's own disk or on a shared one, in which this rank is the first
_LED: set[Path] = set()


def leads(folder: Path) -> bool:
    """Returns whether this rank deletes checkpoints in `folder`: the first rank that sees it."""
    return processes.is_rank_zero() or folder in _LED


def training_entries(trainer: L.Trainer) -> Entries:
    """Returns the entries of a manifest that describe the training."""
    entries: Entries = {KEY: {}}
    for callback in run_callbacks(trainer):
        entries |= callback.manifest_entries()
    return entries | {
        "step": trainer.global_step,
        "world_size": trainer.world_size,
        "strategy": type(trainer.strategy).__name__,
    }


def begin(path: Path, group: Group = None, ranks: Sequence[int] = (0,)) -> Path:
    """Returns an empty folder, into which all ranks write before `finish`. Collective in `group`;
    raises SaveError. `ranks` are those that see the same folder; their first creates it."""
    temporary, failure = _hidden(path, "tmp"), None

    def create() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    if processes.rank(group) == ranks[0]:
        failure = disk_error(create)
    _to_rank_zero(temporary, failure, None, group)
    return temporary


def finish(
    path: Path,
    entries: Entries,
    failure: str | None,
    group: Group = None,
    ranks: Sequence[int] = (),
) -> Files:
    """Hashes the files in the temporary folder of `path`, and renames it. Collective in `group`.

    Each rank flushes and hashes a part of the files. `entries` are the manifest's, other than the
    files; `failure` is why this rank could not write its files, as `disk_error` returns it; `ranks`
    see the same folder (none: all ranks). Returns the files that this rank has hashed.

    Raises:
        SaveError: on all ranks, if a disk refused a write of one; the temporary folder is
            deleted."""
    temporary, ranks = _hidden(path, "tmp"), ranks or range(processes.world_size(group))
    # A network file system may list a new file late, but not to the rank that wrote it: ranks send
    # what rank 0 misses.
    _to_rank_zero(temporary, failure, None, group)  # all have written
    own = {
        file.relative_to(temporary).as_posix() for file in temporary.rglob("*") if file.is_file()
    }
    if len(ranks) == processes.world_size(group):
        listed = {*processes.broadcast(own, group)}
        missed = _to_rank_zero(temporary, None, own - listed, group)
        here = sorted(listed.union(*processes.broadcast([each for each in missed if each], group)))
    else:  # each node has its own files, which are few
        of_ranks = processes.from_all_ranks(own, group)
        here = sorted(set().union(*(of_ranks[rank] for rank in ranks)))
    assigned = here[ranks.index(processes.rank(group)) :: len(ranks)]
    hashes: Files = {}
    failure = disk_error(lambda: _flush_and_hash(temporary, assigned, hashes))
    of_all: Files = {}
    for of_rank in _to_rank_zero(temporary, failure, hashes, group):
        of_all |= of_rank
    entries = {"format": FORMAT, **entries, "time": time.time()}
    entries["files"] = {file: of_all[file] for file in sorted(of_all)}
    text = processes.broadcast(
        manifest.rendered(entries) if processes.rank(group) == 0 else "", group
    )
    if processes.rank(group) == ranks[0]:
        failure = disk_error(lambda: _commit(temporary, path, text))
    _to_rank_zero(temporary, failure, None, group)
    return hashes


def disk_error(write: Callable[[], object]) -> str | None:
    """Calls `write`. Returns which rank's disk refused it and why, or None. Raises other errors.
    Meanwhile torch's writer computes no CRC-32 of each tensor, which takes over half of its CPU
    time: torch's reader never checks it, and the manifest has one for each file."""
    try:
        # The setting is this thread's.
        with serialization.patch("save.compute_crc32", False):  # ty: ignore[missing-attribute]
            write()
        return None
    except (OSError, RuntimeError, CheckpointException) as error:
        # torch's distributed format raises a CheckpointException with the errors of all ranks.
        failures = getattr(error, "failures", {processes.rank(): (error, None)})
        sentences = []
        for rank, (cause, _) in failures.items():
            if isinstance(cause, OSError):
                sentences.append(f"rank {rank}: {reason(cause)}")
            elif re.search(r"PytorchStreamWriter|inline_container", str(cause)):
                # torch.save raises a RuntimeError without an error number
                sentences.append(f"rank {rank}: a file could not be written completely")
            else:
                raise
        return sentences[0]


def _flush_and_hash(folder: Path, files: list[str], hashes: Files) -> None:
    """Flushes first: a network file system may report a full disk only then."""
    for file in files:
        WATCHDOG.keep_alive()
        _flush(folder / file)
        hashes[file] = [(folder / file).stat().st_size, crc32(folder / file)]


def _commit(temporary: Path, path: Path, text: str) -> None:
    (temporary / MANIFEST).write_text(text, encoding="utf-8")
    _flush(temporary / MANIFEST)
    for folder in (temporary, *(entry for entry in temporary.rglob("*") if entry.is_dir())):
        _flush(folder)
    if path.exists():  # it is damaged, or training was rolled back to an earlier step
        old = _hidden(path, "old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    temporary.rename(path)
    _flush(path.parent)
    shutil.rmtree(_hidden(path, "old"), ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some cannot flush folders
            raise
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Deletes a checkpoint; a kill leaves no part of it under a checkpoint's name. For one rank."""
    old = _hidden(path, "old")
    shutil.rmtree(old, ignore_errors=True)
    if failure := disk_error(lambda: path.rename(old)):
        rank_zero_warn(f"{path} could not be deleted: {failure}")
    shutil.rmtree(old, ignore_errors=True)


def clear(folder: Path) -> None:
    """Deletes what killed saves and deletions have left. For one rank, while no save is running."""
    for pattern in (".*step*.ckpt.tmp", ".*step*.ckpt.old"):
        for remnant in folder.glob(pattern):
            shutil.rmtree(remnant, ignore_errors=True)


def _hidden(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


def _to_rank_zero(temporary: Path, failure: str | None, value: T, group: Group) -> list[T]:
    """Returns every rank's `value` on rank 0, [] on the others, once all ranks have come here; if
    one has a failure, raises SaveError on all ranks. Rank 0 deletes the temporary folder then."""
    answers = processes.to_rank_zero((failure, value), group)
    failures = [why for why, _ in answers if why]
    if refusal := processes.broadcast(failures[:1], group):
        if processes.rank(group) == 0 or temporary.parent in _LED:
            shutil.rmtree(temporary, ignore_errors=True)
        raise SaveError(refusal[0])
    return [result for _, result in answers]


# ---- in the background ---------------------------------------------------------------------------


class BackgroundSaver:
    """Saves one checkpoint at a time: training waits for a copy, which a thread writes.

    The thread does what `save` does, over a process group of its own: collectives that two threads
    start in one group would be paired with each other, and the ranks would abort. torch's
    `dcp.async_save` covers only the distributed format, and neither hashes nor commits; its stager,
    which copies to pinned memory and reuses that memory, is used here. All ranks create the saver
    together.

    Args:
        strategy: Any, without state on NVMe. Its timeout also limits the save's collectives."""

    def __init__(self, strategy: Strategy) -> None:
        device = strategy.root_device
        has_gpu = device.type == "cuda"  # memory can be pinned only for a GPU
        options = StagingOptions(use_shared_memory=False, use_async_staging=False)
        options.use_pinned_memory = options.use_non_blocking_copy = has_gpu
        self._stager = DefaultStager(options)
        # A thread starts on GPU 0; each rank's would take half a gigabyte there.
        choose = partial(torch.cuda.set_device, device) if has_gpu else None
        self._thread = ThreadPoolExecutor(1, "checkpoint", choose)
        self._save: Future[None] | None = None
        self._group: Group = None
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timeout_of(strategy))

    def start(self, trainer: L.Trainer, path: Path) -> None:
        """Copies the present state, and starts to write it as `path`. Collective; call `wait`
        before the next."""
        assert self._save is None
        path, checkpoint = Path(processes.broadcast(str(path))), plain(checkpoint_of(trainer))
        write = format_for(trainer.strategy).stage(checkpoint, self._stager.stage, self._group)
        entries = training_entries(trainer)
        self._save = self._thread.submit(write_into, path, entries, write, self._group, trainer)

    def wait(self) -> None:
        """Waits until the checkpoint is committed. Collective; raises SaveError."""
        save, self._save = self._save, None
        if save is not None:
            save.result()

    def abandon(self) -> None:
        """Waits for the write after training has failed; its errors are ignored."""
        save, self._save = self._save, None
        if save is not None:
            save.exception()

    def close(self) -> None:
        """Frees memory, thread and process group."""
        self.abandon()
        self._thread.shutdown()
        self._stager.close()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
