"""Hooks of the store, see dist_template.hooks: before a start, when a checkpoint is loaded, at the end of a run."""

import os
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

from ...cluster.launch import Variable
from ...errors import InputError
from .callback import UPLOADS
from .local import copy_run, local_copy, manifests, time_of
from .remote import Remote, StoreError, retried

FETCH_S = 120.0  # for each file, with retries


def at_start(settings: Namespace, verb: str | None) -> None:
    """Checks `run.store`, and copies what this disk lacks of the run that is continued or evaluated."""
    given, store = settings.get("ckpt_path"), settings.run.store
    if "store" in settings:
        settings.store.address = f"{store.rstrip('/')}/{settings.run.name}" if store else None
    runs = Remote(store) if store else None
    if verb and given and "://" in given:
        settings.ckpt_path = local_copy(given, "--ckpt_path")
    elif verb and runs and not settings.trainer.fast_dev_run:
        is_chosen = given in ("last", "best") or (verb != "fit" and not given)  # else by its id, or by a path
        is_first = not any(int(os.environ.get(name) or 0) for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))
        if verb == "fit" and is_first:
            runs.check()
        runs, run_id = runs / settings.run.name, os.environ.get(Variable.RUN_ID) or os.environ.get("SLURM_JOB_ID")
        try:
            if is_chosen:
                times = {name: max(map(time_of, manifests(runs / name).values()), default=0) for name in runs.names()}
                run_id = max(times, key=times.__getitem__, default=None)
            if run_id and (is_chosen or verb == "fit"):
                folder = Path(settings.run.root, settings.run.name, run_id)
                paths = [settings[key].dirpath for key in ("last_checkpoint", "best_checkpoint")]
                copy_run(runs / run_id, folder, is_first, *(Path(path.replace("{run}", str(folder))) for path in paths))
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
