"""Hooks of the store, see dist_template.hooks, and copies of runs for other verbs. Without torch, as `diagnose`.

A copy has a run's small files and the manifests of its checkpoints; ranks that load a checkpoint fetch its files."""

import json
import os
import re
import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ...cluster.launch import Variable
from ...errors import InputError
from ...observe.history.run import RunFile
from ..diagnose.finding import Cause, Finding
from ..history import History
from .remote import CHECKPOINTS, MANIFEST, UPLOADS, Remote, StoreError, retried

CHECKPOINT = re.compile(r"(best-)?step\d{8,}\.ckpt")
FETCH_S = 120.0  # for each file, with retries


def at_start(settings: Namespace, verb: str | None) -> None:
    """Checks `run.store`, and copies what this disk lacks of the run that is continued or evaluated."""
    given, store, run = settings.get("ckpt_path"), settings.run.store, settings.run
    if "store" in settings:
        settings.store.address = store and f"{store.rstrip('/')}/{run.name}"
    runs = Remote(store) / run.name if store else None
    if verb and given and "://" in given:
        settings.ckpt_path = local_copy(given, "--ckpt_path")
    elif verb and runs and not settings.trainer.fast_dev_run:
        is_first = sum(int(os.environ.get(name) or 0) for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK")) == 0
        if verb == "fit" and is_first:
            runs.check()
        try:
            run_id = os.environ.get(Variable.RUN_ID) or os.environ.get("SLURM_JOB_ID")
            if given in ("last", "best") or (verb != "fit" and not given):
                run_id = newest_run(runs)
            elif verb != "fit":
                run_id = None
            if run_id:
                folder = Path(run.root, run.name, run_id)
                last, best = settings.last_checkpoint.dirpath, settings.best_checkpoint.dirpath
                last, best = (Path(path.replace("{run}", str(folder))) for path in (last, best))
                copy_run(runs / run_id, folder, is_first, last, best)
        except StoreError as error:
            raise InputError(f"run.store {store!r} cannot be read: {error}; give another, or null") from None


def fetch(address: str, files: list[str], folder: Path) -> str | None:
    """Downloads the files of a checkpoint into its folder; returns why it could not, or None."""
    for file in files:
        try:
            retried(partial((Remote(address) / file).get, folder / file), time.monotonic() + FETCH_S)
        except (StoreError, InputError) as error:
            return f"its {file} cannot be fetched from {address}: {error}"
    return None


def at_run_end(run: Path, error: BaseException | None) -> None:
    """Uploads what was written after the last upload, such as the report."""
    if run in UPLOADS:
        UPLOADS[run]()


def local_copy(given: str | Path, key: str = "RUN") -> str:
    """Returns `given`, or a local copy of the run or the checkpoint at a store's address. Raises InputError."""
    address = re.sub(r"^(\w{2,}):/(?!/)", r"\1://", str(given))  # as a Path has it
    if "://" not in address:
        return str(given)
    of_run, name = address.rstrip("/"), ""
    if CHECKPOINT.fullmatch(of_run.rpartition("/")[2]):
        of_run, _, name = of_run.rsplit("/", 2)
    run = Remote(of_run, key)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dist_template", "store")
    folder = cache / run.protocol / run.path.strip("/")
    try:
        if RunFile.CONFIG in run.names():
            copy_run(run, folder, True, folder / CHECKPOINTS, folder / CHECKPOINTS)
    except StoreError as error:
        raise InputError(f"{key} {address!r} cannot be read: {error}; give another") from None
    copy = folder / CHECKPOINTS / name if name else folder
    if not copy.exists():
        raise InputError(
            f"{key} {address!r} is no run with a {RunFile.CONFIG} and no complete checkpoint; give another"
        )
    return str(copy)


def copy_run(run: Remote, folder: Path, has_files: bool, last: Path, best: Path) -> None:
    """Copies manifests that are newer than those here, or missing here, and files that are missing or shorter here."""
    for name, content in manifests(run).items():
        file = last / name / MANIFEST
        if name.startswith("best"):
            file = best / name / MANIFEST
        own = file.exists() and file.read_bytes()
        if content and own != content and time_of(own or b"") <= time_of(content):
            (run / CHECKPOINTS / name / MANIFEST).get(file)
    sizes = run.sizes() if has_files else {}
    for name, size in sizes.items():
        file = folder / name
        if not name.startswith(f"{CHECKPOINTS}/") and not (file.exists() and file.stat().st_size >= size):
            (run / name).get(file)


def manifests(run: Remote) -> dict[str, bytes]:
    """Returns the manifests of the run's checkpoints, by the checkpoints' names; empty ones of incomplete uploads."""
    names = filter(CHECKPOINT.fullmatch, (run / CHECKPOINTS).names())
    return {name: (run / CHECKPOINTS / name / MANIFEST).read() for name in names}


def newest_run(runs: Remote) -> str | None:
    """Returns the run with the newest checkpoint, or None."""
    newest, found = 0.0, None
    for name in runs.names():
        for content in manifests(runs / name).values():
            if time_of(content) > newest:
                newest, found = time_of(content), name
    return found


def time_of(manifest: bytes) -> float:
    """Returns when a checkpoint was written; 0 if its manifest is damaged."""
    try:
        return float(json.loads(manifest)["time"])
    except (ValueError, LookupError, TypeError):
        return 0.0


def store_refuses(history: History) -> Iterator[Finding]:
    """Rule of diagnosis: the store refuses checkpoints."""
    failed = history.metrics["health/store_failed"]
    if len(failed) and failed.last:
        evidence = f"The last {failed.last:.0f} uploads to {history.key('run.store')} failed; the log has the reasons."
        cause = Cause("The store refuses or does not answer: credentials expired, a quota is used up, no network.")
        yield Finding("store_refuses", "error", "certain", "checkpoints are not in the store", evidence, [cause])
