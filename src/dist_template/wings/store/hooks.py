"""Hooks of the store, see dist_template.hooks, its rule, and copies of runs for other verbs.
Without torch.

A copy has a run's small files and the manifests of its checkpoints; ranks that load a checkpoint
fetch its files."""

import json
import os
import re
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from ...cluster.launch import Variable
from ...errors import InputError
from ...observe.history.run import RunFile
from ..diagnose.finding import Cause, Finding
from ..history import History
from .remote import CHECKPOINTS, MANIFEST, UPLOADS, Remote

# s3:/… is an address as a Path
RUN = re.compile(r"(\w{2,}):/{1,2}(.+?)(/checkpoints/(?:best-)?step\d{8,}\.ckpt)?/*")
FETCH_S = 120.0  # for which the download of a file is tried again


def at_start(settings: Namespace, verb: str | None) -> None:
    """Checks `run.store`, and copies what this disk lacks of the run that is continued or
    evaluated."""
    given, store, run = settings.get("ckpt_path"), settings.run.store, settings.run
    if "store" in settings:
        settings.store.address = store and f"{store.rstrip('/')}/{run.name}"
    runs = Remote(store) / run.name if store else None
    if verb and given and "://" in given:
        settings.ckpt_path = local_copy(given, "--ckpt_path")
    elif verb and runs and not settings.trainer.fast_dev_run:
        is_first = (
            sum(int(os.environ.get(name) or 0) for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))
            == 0
        )
        if verb == "fit" and is_first:
            runs.check()
        run_id = os.environ.get(Variable.RUN_ID) or os.environ.get("SLURM_JOB_ID")
        if given in ("last", "best") or (verb != "fit" and not given):
            written = checkpoints(runs)
            run_id = max(written, key=written.__getitem__, default="").partition("/")[0]
        if run_id:
            folder = Path(run.root, run.name, run_id)
            folders = (settings.last_checkpoint.dirpath, settings.best_checkpoint.dirpath)
            last, best = (Path(path.replace("{run}", str(folder))) for path in folders)
            copy_run(runs / run_id, folder, is_first, last, best)


def fetch(address: str, files: list[str], folder: Path) -> str | None:
    """Downloads the files of a checkpoint into its folder; returns why it could not, or None."""
    for file in files:
        try:
            (Remote(address, until=time.monotonic() + FETCH_S) / file).get(folder / file)
        except InputError as error:
            return f"its {file} cannot be fetched: {error}"
    return None


def at_run_end(run: Path, error: BaseException | None) -> None:
    """Uploads what was written after the last upload, such as the report."""
    if run in UPLOADS:
        UPLOADS[run]()


def local_copy(given: str | Path, key: str = "RUN") -> str:
    """Returns `given`, or a local copy of the run or the checkpoint at a store's address. Raises
    InputError."""
    if not (found := RUN.fullmatch(str(given))):
        return str(given)
    protocol, path, checkpoint = found.groups("")
    run = Remote(f"{protocol}://{path}", key)
    cache = Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dist_template", "store"
    )
    folder = cache / protocol / path.strip("/")
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
    for path, written in checkpoints(run).items():
        name = path.split("/")[-2]
        file = (best if name.startswith("best") else last) / name / MANIFEST
        if not file.exists() or time_of(file.read_bytes()) <= written:
            (run / path).get(file)
    for path, size in run.sizes().items() if has_files else ():
        file = folder / path
        if not path.startswith(f"{CHECKPOINTS}/") and not (
            file.exists() and file.stat().st_size >= size
        ):
            (run / path).get(file)


def checkpoints(folder: Remote) -> dict[str, float]:
    """Returns when the complete checkpoints below a folder were written, by the paths of their
    manifests in it."""
    return {
        path: time_of((folder / path).read())
        for path in folder.sizes()
        if path.endswith(f".ckpt/{MANIFEST}")
    }


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
        evidence = (
            f"The last {failed.last:.0f} uploads to {history.key('run.store')} failed; the log has"
            " the reasons."
        )
        cause = Cause(
            "The store refuses or does not answer: credentials expired, a quota is used up, no"
            " network."
        )
        yield Finding(
            "store_refuses",
            "error",
            "certain",
            "checkpoints are not in the store",
            evidence,
            [cause],
        )
