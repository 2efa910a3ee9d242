"""Hooks of the store, see dist_template.hooks: before a start, when a checkpoint is loaded, at the end of a run."""

import os
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

from ...cluster.launch import Variable
from ...errors import InputError
from .callback import UPLOADS
from .local import copy_run, local_copy, newest_run
from .remote import Remote, StoreError, retried

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
