"""Copies what a store has of a run to this disk: its small files, and the manifests of its checkpoints.

The ranks that load a checkpoint fetch its files. This module needs no torch, as `diagnose` and `report`."""

import json
import os
import re
from pathlib import Path

from ...errors import InputError
from ...observe.history.run import RunFile
from .remote import Remote, StoreError

CHECKPOINT = re.compile(r"(best-)?step\d{8,}\.ckpt")
CHECKPOINTS, MANIFEST = "checkpoints", "manifest.json"


def local_copy(given: str | Path, key: str = "RUN") -> str:
    """Returns `given`, or a local copy of the run or the checkpoint at a store's address. Raises InputError."""
    address = re.sub(r"^(\w{2,}):/(?!/)", r"\1://", str(given))  # as a Path has it
    if "://" not in address:
        return str(given)
    run, name = Remote(address, key), ""
    if CHECKPOINT.fullmatch(address.rstrip("/").rpartition("/")[2]):
        run.path, _, name = run.path.rsplit("/", 2)
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
