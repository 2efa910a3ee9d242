"""Hooks of the store, see dist_template.hooks: what the store has and this disk lacks, and the last files of a run."""

import os
import time
from argparse import Namespace
from pathlib import Path

from ...cluster.launch import Variable
from ...errors import InputError
from .callback import UPLOADED
from .local import copy_manifests, copy_small_files, local_copy, newest_run
from .remote import Remote, StoreError, retried

FETCH_S = 120.0  # for each file, with retries


def at_start(settings: Namespace, verb: str | None) -> None:
    """Checks `run.store`, and copies the manifests and small files that this disk lacks, so that the run resumes.
    Without a `verb`, nothing runs: only the address is checked.

    Raises InputError if the address is wrong, or the store refuses."""
    given, store = settings.get("ckpt_path"), settings.run.store
    if verb and given and "://" in given:
        settings.ckpt_path = local_copy(given, "--ckpt_path")
    if "store" in settings:
        settings.store.address = f"{store.rstrip('/')}/{settings.run.name}" if store else None
    if not store:
        return
    runs = Remote(store)
    if not verb or settings.trainer.fast_dev_run:
        return
    is_first = _number("RANK", "SLURM_PROCID") == _number("LOCAL_RANK") == 0
    runs.check(writes=verb == "fit" and is_first)
    runs, chosen = runs / settings.run.name, given in ("last", "best")
    if verb != "fit" and given and not chosen:
        return
    try:
        run_id = os.environ.get(Variable.RUN_ID) or os.environ.get("SLURM_JOB_ID")
        if verb != "fit" or chosen:
            run_id = newest_run(runs, runs.names())
        if run_id:
            folder = Path(settings.run.root, settings.run.name, run_id)
            if is_first:
                copy_small_files(runs / run_id, folder)
            last, best = (settings[key].dirpath for key in ("last_checkpoint", "best_checkpoint"))
            copy_manifests(runs / run_id, *(Path(path.replace("{run}", str(folder))) for path in (last, best)))
    except StoreError as error:
        raise InputError(f"run.store {store!r} cannot be read: {error}; give another, or null") from None


def _number(*names: str) -> int:
    return int(next(filter(None, map(os.environ.get, names)), "0"))


def fetch(address: str, files: list[str], folder: Path) -> str | None:
    """Downloads the files of a checkpoint into its folder; returns why it could not, or None."""
    for file in files:
        try:
            remote = Remote(address) / file
            retried(lambda remote=remote, file=file: remote.get(folder / file), time.monotonic() + FETCH_S)
        except (StoreError, InputError) as error:
            return f"its {file} cannot be fetched from {address}: {error}"
    return None


def at_run_end(run: Path, error: BaseException | None) -> None:
    """Uploads the files that were written after the last upload, such as the report."""
    if run in UPLOADED:
        UPLOADED[run].upload()
