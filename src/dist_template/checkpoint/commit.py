"""A checkpoint is written aside, hashed, committed by one rename, and verified when it is read.

    step00000040.ckpt/          a checkpoint: manifest.json, and beside it what the strategy wrote
    best-step00000040.ckpt/     the same
    .step00000040.ckpt.tmp/     being written, or left by a save that was killed
    .step00000040.ckpt.old/     being deleted

torch's distributed format and DeepSpeed write into the folder that they are given: a save that is killed half-way
leaves one rank's new shard beside another's old one, and both load it without a word. Here a name without a dot in
front appears in one rename, when every file is whole and on the disk. What a manifest says: manifest.py.

All ranks must see one folder: on a shared file system, where there is more than one node.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.serialization import config as serialization

from .. import weights
from ..cluster.watchdog import WATCHDOG
from ..compat.lightning import checkpoint_of
from ..errors import InputError, reason
from . import manifest
from .manifest import FORMAT, MANIFEST, Files, crc32, wrong_file


class SaveError(Exception):
    """No checkpoint was committed, on any rank; what stood in the folder before still stands."""


# ---- writing ---------------------------------------------------------------------------------------------------------


def save(trainer: L.Trainer, path: Path, **notes: Any) -> None:
    """Commit the present state as `path`; `notes` go into its manifest. Collective.

    Raises:
        SaveError: on all ranks, a disk refused one of them.
    """
    path = Path(weights.broadcast(str(path)))
    checkpoint = checkpoint_of(trainer)
    aside = begin(path)
    trouble = disk_trouble(lambda: trainer.strategy.save_checkpoint(checkpoint, aside))
    finish(path, describe(trainer) | notes, trouble)


def describe(trainer: L.Trainer) -> dict[str, Any]:
    """What a manifest says of the training."""
    return {
        "step": trainer.global_step,
        "world_size": trainer.world_size,
        "strategy": type(trainer.strategy).__name__,
    }


def begin(path: Path, group: Any = None, trouble: str | None = None) -> Path:
    """An empty folder, in which the ranks write what `finish` makes `path` of. Collective over `group`.

    `trouble` is why this rank has nothing to write.

    Raises:
        SaveError: on all ranks, it cannot be made, or one of them has nothing to write.
    """
    aside = _beside(path, "tmp")
    if _rank(group) == 0:
        trouble = trouble or disk_trouble(lambda: _empty(aside))
    with _all_or_nothing(aside, group):
        _agree(trouble, None, group)
    return aside


def finish(path: Path, about: dict[str, Any], trouble: str | None = None, group: Any = None) -> None:
    """Hash what the ranks have written aside, and make it `path`. Collective over `group`.

    Each rank hashes and flushes its share of the files.

    Args:
        path: The checkpoint's name.
        about: What the manifest says beside the files.
        trouble: Why this rank could not write, from `disk_trouble`.
        group: Of the ranks that have written. None: all.

    Raises:
        SaveError: on all ranks, a disk refused one of them; what was written is deleted.
    """
    aside = _beside(path, "tmp")
    with _all_or_nothing(aside, group):
        # A directory of a network file system may be listed late; but not to the rank that wrote in it.
        listings = _agree(trouble, _files(aside), group)
        files = sorted(set().union(*listings))
        hashes: Files = {}
        trouble = disk_trouble(lambda: _flush_and_hash(aside, _share(files, group), hashes))
        known = {file: value for part in _agree(trouble, hashes, group) for file, value in part.items()}
        full = {"format": FORMAT, **about, "time": time.time(), "files": {file: known[file] for file in files}}
        _agree(disk_trouble(lambda: _commit(aside, path, full)) if _rank(group) == 0 else None, None, group)


def disk_trouble(write: Callable[[], object]) -> str | None:
    """Call `write`; which rank's disk refused and why, None where none did. Whatever else goes wrong is raised.

    torch's writer then computes no CRC-32 of each tensor, over half of its CPU time: torch's reader never looks at it,
    and the manifest has one of every byte.
    """
    try:
        with serialization.patch("save.compute_crc32", False):  # this thread's  # ty: ignore[missing-attribute]
            write()
    except (OSError, RuntimeError, CheckpointException) as error:
        causes: dict[int, BaseException] = {_rank(None): error}
        if isinstance(error, CheckpointException):  # torch's distributed format tells it on every rank
            causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        if not all(isinstance(cause, OSError) or _is_of_torchs_writer(cause) for cause in causes.values()):
            raise
        rank, cause = next(iter(causes.items()))
        return (
            f"rank {rank}: {reason(cause) if isinstance(cause, OSError) else 'a file could not be written to its end'}"
        )
    return None


def _is_of_torchs_writer(error: BaseException) -> bool:
    """torch.save tells a full disk as a RuntimeError of its archive, which has no number and no type of its own."""
    return isinstance(error, RuntimeError) and bool(re.search(r"PytorchStreamWriter|inline_container", str(error)))


@contextlib.contextmanager
def _all_or_nothing(aside: Path, group: Any) -> Generator[None]:
    """Delete what was written aside when the ranks give up."""
    try:
        yield
    except SaveError:
        if _rank(group) == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _files(folder: Path) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def _flush_and_hash(aside: Path, files: list[str], hashes: Files) -> None:
    """Flushing comes first: a network's or a delaying file system may refuse only then."""
    for file in files:
        WATCHDOG.keep_alive()
        _flush(aside / file)
        hashes[file] = [(aside / file).stat().st_size, crc32(aside / file)]


def _commit(aside: Path, path: Path, full: dict[str, Any]) -> None:
    (aside / MANIFEST).write_text(manifest.rendered(full), encoding="utf-8")
    _flush(aside / MANIFEST)
    for folder in (aside, *(entry for entry in aside.rglob("*") if entry.is_dir())):
        _flush(folder)
    earlier = _beside(path, "old")
    if path.exists():  # it was passed over as damaged, or training was rolled back to before it
        shutil.rmtree(earlier, ignore_errors=True)
        path.rename(earlier)
    aside.rename(path)
    _flush(path.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems flush no folders
            raise
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a checkpoint; a kill on the way leaves no part of it under a checkpoint's name. For one rank."""
    hidden = _beside(path, "old")
    shutil.rmtree(hidden, ignore_errors=True)
    if trouble := disk_trouble(lambda: path.rename(hidden)):
        rank_zero_warn(f"{path} could not be deleted: {trouble}")
    shutil.rmtree(hidden, ignore_errors=True)


def clear(folder: Path) -> None:
    """Delete what saves and deletions that were killed have left. For one rank, when nothing is being saved."""
    for pattern in (".*step*.ckpt.tmp", ".*step*.ckpt.old"):
        for left in folder.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


# ---- reading ---------------------------------------------------------------------------------------------------------


def verify(path: Path) -> str | None:
    """Why the checkpoint `path` is not valid, by every byte of it; None where it is."""
    try:
        files = manifest.read(path)["files"]
    except ValueError as error:
        return str(error)
    return wrong_file(path, files, files)


def newest(folder: Path) -> Path | None:
    """The newest checkpoint in `folder` that is not torn, by its manifest and sizes; warns of those passed over."""
    passed = []
    for path in manifest.found(folder):
        if (why := manifest.torn(path)) is None:
            _warn_of(passed, path)
            return path
        passed.append(f"{path.name} ({why})")
    _warn_of(passed, None)
    return None


def agreed(path: Path) -> Path:
    """The checkpoint that all ranks load, every byte of it verified. Collective; each rank reads its share.

    Args:
        path: A checkpoint, which may be of another's format and is then taken as it is; or a folder of checkpoints, of
            which the newest valid one is taken.

    Raises:
        InputError: on all ranks, `path` is damaged, or all in the folder are.
    """
    path = Path(weights.broadcast(str(path)))
    if weights.broadcast((path.parent / MANIFEST).exists()):  # someone gives the file in a checkpoint's folder
        path = path.parent
    several = weights.broadcast([str(one) for one in manifest.found(path)])
    passed, why = [], None
    for candidate in map(Path, several or [path]):
        if (why := _wrong_together(candidate)) is None:
            _warn_of(passed, candidate)
            return candidate
        passed.append(f"{candidate.name} ({why})")
    if several:
        raise InputError(f"{path} holds damaged checkpoints only: {', '.join(passed)}; move it away to start anew")
    raise InputError(f"checkpoint {str(path)!r} is damaged: {why}; give another, or `last` for the newest valid one")


def _wrong_together(path: Path) -> str | None:
    """`verify`, the files shared out over the ranks, with one answer on all of them."""
    files, why = {}, None
    if weights.is_rank_zero() and manifest.is_ours(path):
        try:
            files = manifest.read(path)["files"]
        except ValueError as error:
            why = str(error)
    files, why = weights.broadcast((files, why))
    answers = weights.from_all_ranks(why or wrong_file(path, files, _share(list(files), None)))
    return next(filter(None, answers), None)


def _warn_of(passed: list[str], taken: Path | None) -> None:
    if passed:
        instead = f"{taken} is taken" if taken else "no other is there"
        rank_zero_warn(f"damaged checkpoints are passed over: {', '.join(passed)}; {instead}")


# ---- ranks -----------------------------------------------------------------------------------------------------------


def _rank(group: Any) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _share(files: list[str], group: Any) -> list[str]:
    return files[_rank(group) :: dist.get_world_size(group) if dist.is_initialized() else 1]


def _agree(trouble: str | None, value: Any, group: Any) -> list[Any]:
    """Every rank's `value`; none goes on before all are here.

    Raises:
        SaveError: on all ranks, one of them has met trouble.
    """
    answers = weights.from_all_ranks((trouble, value), group)
    if told := [why for why, _ in answers if why]:
        raise SaveError(told[0])
    return [value for _, value in answers]
