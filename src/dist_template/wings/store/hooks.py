"""Hooks of the store, see dist_template.hooks, its rule, and copies of runs for other verbs.
Without torch.

1  Before a verb starts, `at_start` copies what this disk lacks of the run that is continued or
   evaluated: its small files and the manifests of its checkpoints.
2  Ranks that load a checkpoint fetch its files (`fetch`).
3  After training, `at_run_end` uploads the last files and releases the lock.

Other verbs get their copy of a run in a store by `local_copy`."""

import json
import os
import re
import shutil
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from ...cluster.launch import Variable
from ...errors import Ended, Exit, InputError, shortened
from ...foreign import refuse_links, text_of
from ...hooks import StoreIsDown
from ...observe.history.run import PLACEHOLDER, RunFile
from ..diagnose.finding import Cause, Finding
from ..history import History
from .lock import LOCKS
from .remote import CHECKPOINTS, MANIFEST, UPLOADS, Remote, StoreDown, is_below

# An address such as s3://…; s3:/… is the same one after it was a Path.
RUN = re.compile(r"(\w{2,}):/{1,2}(.+?)(/checkpoints/(?:best-)?step\d{8,}\.ckpt)?/*")
MANIFEST_OF_CHECKPOINT = re.compile(rf"(?:.*/)?(?:best-)?step\d{{8,}}\.ckpt/{MANIFEST}")
MOST = 64 * 2**20  # bytes of a manifest
FETCH_S = 120.0  # for which the download of a file is tried again
DOWN_S = 300.0  # for which a training waits at its start for a store that does not answer
# Addresses that the user gave: `run.store`, or a run's. A manifest may name a folder below one.
OWN: set[str] = set()
# Address of a run: when the newest checkpoint in the store was written that this process knows of.
NEWEST: dict[str, float] = {}


def at_start(settings: Namespace, verb: str | None) -> None:
    """Checks `run.store`, and copies what this disk lacks of the run that is continued or
    evaluated. Raises Ended with the code of a relaunch if the store of a training is down."""
    store, run = settings.run.store, settings.run
    if store is not None:
        OWN.add(store.rstrip("/"))
    try:
        runs = None if store is None else Remote(store) / run.name
        if "store" in settings:
            if settings.store.folder != PLACEHOLDER:  # its files would be uploaded
                what = "it is the run's folder; remove the key"
                raise InputError(f"store.folder is {settings.store.folder!r}: {what}")
            settings.store.address = None if runs is None else runs.address
        _prepare(settings, verb, runs)
    except StoreDown as error:
        if verb != "fit":
            raise
        raise Ended(Exit.REQUEUE, f"{error}") from error


def _prepare(settings: Namespace, verb: str | None, runs: Remote | None) -> None:
    given, run = settings.get("ckpt_path"), settings.run
    if verb == "fit" and runs:
        runs.until, runs.waits_for_answers = time.monotonic() + DOWN_S, True
    if verb and given and "://" in given:
        settings.ckpt_path = local_copy(given, "--ckpt_path", waits=verb == "fit")
    elif verb and runs and not settings.trainer.fast_dev_run:
        is_first = not any(map(_rank, ("RANK", "SLURM_PROCID", "LOCAL_RANK")))
        if verb == "fit" and is_first:
            runs.check()
        run_id = os.environ.get(Variable.RUN_ID)
        if not run_id:
            run_id = os.environ.get("SLURM_JOB_ID")
        if given in ("last", "best") or (verb != "fit" and not given):
            written = checkpoints(runs)
            run_id = max(written, key=written.__getitem__, default="").partition("/")[0]
        if run_id:
            folder = Path(run.root, run.name, run_id)
            folders = (settings.last_checkpoint.dirpath, settings.best_checkpoint.dirpath)
            last, best = (Path(path.replace("{run}", str(folder))) for path in folders)
            copy_run(runs / run_id, folder, is_first, last, best)


def _rank(variable: str) -> int:
    """Returns the number in an environment variable; 0 if it is not set or empty."""
    text = os.environ.get(variable)
    return int(text) if text else 0


def fetch(address: str, files: list[str], folder: Path) -> str | None:
    """Downloads the files of a checkpoint into its folder; returns why it could not, or None. The
    address is a manifest's, which may be a stranger's: it must be one that the user gave."""
    if not is_below(address, OWN):
        return (
            f"its {files[0]} is not here, and the store that its manifest names,"
            f" {shortened(address, 200)}, is not one that you gave: if it is yours, give the run's"
            " address in it in place of the folder, or its prefix as --run.store"
        )
    remote = Remote(address, until=time.monotonic() + FETCH_S)
    for file in files:
        try:
            remote.get(file, folder)
        except InputError as error:
            kind = StoreIsDown if isinstance(error, StoreDown) else str
            return kind(f"its {file} cannot be fetched: {error}")
    return None


def at_run_end(run: Path, error: BaseException | None) -> None:
    """Uploads what was written after the last upload, such as the report, and ends the lock."""
    try:
        if run in UPLOADS:
            UPLOADS[run]()
    finally:
        lock = LOCKS.pop(run, None)
        if lock is not None:
            lock.release()


def local_copy(given: str | Path, key: str = "RUN", waits: bool = False) -> str:
    """Returns `given`, or a local copy of the run or the checkpoint at a store's address. Raises
    InputError. `waits` for a store that is down."""
    found = RUN.fullmatch(str(given))
    if found is None:
        return str(given)
    protocol, path, checkpoint = found.groups("")
    if protocol in ("file", "local") and isinstance(given, Path):
        path = f"/{path.lstrip('/')}"  # Path turns file:///a into file:/a
    if not path.strip("/"):
        raise InputError(f"{key} {str(given)!r} names no run in the store; give its address")
    until = time.monotonic() + DOWN_S if waits else 0.0
    run = Remote(f"{protocol}://{path}", key, until, waits_for_answers=waits)
    cache = os.environ.get("XDG_CACHE_HOME")
    if not cache:
        cache = Path.home() / ".cache"
    folder = Path(cache, "dist_template", "store", protocol, path.strip("/"))
    copy = folder / checkpoint.strip("/")
    if RunFile.CONFIG in run.sizes():
        copy_run(run, folder, True, folder / CHECKPOINTS, folder / CHECKPOINTS)
    if not copy.exists():
        what = f"no run with a {RunFile.CONFIG} and no complete checkpoint"
        raise InputError(f"{key} '{run.address}{checkpoint}' is {what}; give another")
    return str(copy)


def copy_run(run: Remote, folder: Path, has_files: bool, last: Path, best: Path) -> None:
    """Copies manifests that are newer than those here, or missing here, and files that are missing
    or shorter here."""
    OWN.add(run.address)
    if folder.is_dir():
        refuse_links(folder)
    stored = checkpoints(run)
    NEWEST[run.address] = max(stored.values(), default=0.0)
    for path, written in stored.items():
        name = path.split("/")[-2]
        kind = best if name.startswith("best") else last
        checkpoint = kind / name
        file = checkpoint / MANIFEST
        if not file.exists() or time_of(text_here(file)) <= written:
            (run / path.removesuffix(f"/{MANIFEST}")).get(MANIFEST, checkpoint)
    if not has_files:
        return
    for path, size in run.sizes().items():
        # Hidden files are the lock, and remnants of interrupted uploads.
        if path.startswith((f"{CHECKPOINTS}/", ".")) or "/." in path:
            continue
        file = folder / path
        if not file.exists() or file.stat().st_size < size:
            _check_space(run, path, size, folder)
            run.get(path, folder)


def _check_space(run: Remote, path: str, size: int, folder: Path) -> None:
    """Raises InputError if this disk has no room for a file of `size` bytes, before it is filled:
    a stranger's store may have files of any size."""
    existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(existing).free
    if size > free:
        raise InputError(
            f"{run.address}/{shortened(path, 200)} has {size} bytes, and the disk of {existing} has"
            f" {free} free: remove the file there, or set XDG_CACHE_HOME to another disk"
        )


def checkpoints(folder: Remote) -> dict[str, float]:
    """Returns when the complete checkpoints below a folder were written, by the paths of their
    manifests in it."""
    found = {}
    for path, size in folder.sizes().items():
        if MANIFEST_OF_CHECKPOINT.fullmatch(path) and size <= MOST:
            found[path] = time_of((folder / path).read())
    return found


def missed(run: Remote) -> str:
    """Returns a sentence if another launch has stored a checkpoint of the run since this process
    read the store, else "". This disk would continue from an older checkpoint, and the store would
    accept its uploads. Raises InputError of the store."""
    known = NEWEST.get(run.address)
    if known is None or max(checkpoints(run).values(), default=0.0) <= known:
        return ""
    return (
        f"{run.address} has a newer checkpoint than when this launch looked: another launch stored"
        " it before it ended; give the same command again"
    )


def text_here(file: Path) -> str:
    try:
        return text_of(file)
    except (OSError, ValueError):  # no file, or no text
        return ""


def time_of(manifest: bytes | str) -> float:
    """Returns when a checkpoint was written; 0 if its manifest is damaged."""
    try:
        return float(json.loads(manifest)["time"])
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError):
        return 0.0


def store_refuses(history: History) -> Iterator[Finding]:
    """Rule of diagnosis: the store refuses checkpoints."""
    failed = history.metrics["health/store_failed"]
    if not len(failed) or not failed.last:
        return
    title = "checkpoints are not in the store"
    evidence = (
        f"The last {failed.last:.0f} uploads to {history.key('run.store')} failed; the log has the"
        " reasons."
    )
    cause = Cause(
        "The store refuses or does not answer: credentials expired, a quota is used up, no network."
    )
    yield Finding("store_refuses", "error", "certain", title, evidence, [cause])
