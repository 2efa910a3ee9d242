"""Copies what a store has of a run to this disk: small files, and the manifests of checkpoints.

The files of a checkpoint are fetched when it is loaded, by the ranks that load it."""

import json
import os
import re
from pathlib import Path

from ...errors import InputError
from .remote import Remote, StoreError

CHECKPOINT = re.compile(r"(best-)?step\d{8,}\.ckpt")
CHECKPOINTS, MANIFEST, CONFIG = "checkpoints", "manifest.json", "config.yaml"


def manifests(run: Remote) -> dict[str, bytes]:
    """Returns the manifests of the run's valid checkpoints in the store, by name."""
    found = {}
    for name in (run / CHECKPOINTS).names():
        if CHECKPOINT.fullmatch(name) and (content := (run / CHECKPOINTS / name / MANIFEST).read()):
            found[name] = content
    return found


def time_of(content: bytes) -> float:
    """Returns when a checkpoint was written, by its manifest; 0 if that is damaged."""
    try:
        return float(json.loads(content)["time"])
    except (ValueError, LookupError, TypeError):
        return 0.0


def newest_run(runs: Remote, names: list[str]) -> str | None:
    """Returns the run with the newest checkpoint; None if there is no checkpoint."""
    times = {name: max(map(time_of, manifests(runs / name).values()), default=0.0) for name in names}
    newest = max(times, key=times.__getitem__, default=None)
    return newest if newest and times[newest] else None


def copy_manifests(run: Remote, last: Path, best: Path) -> None:
    """Writes the manifests of checkpoints that are newer in the store, or missing or damaged here, into the folders of
    the run's checkpoints."""
    for name, content in manifests(run).items():
        file = (best if name.startswith("best") else last) / name / MANIFEST
        own = file.read_bytes() if file.exists() else b""
        if own != content and time_of(own) <= time_of(content):
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f".{MANIFEST}.{os.getpid()}.tmp")
            temporary.write_bytes(content)
            os.replace(temporary, file)


def copy_small_files(run: Remote, folder: Path) -> None:
    """Downloads the run's other files that are missing here, or were changed in the store after they were here."""
    for name, entry in run.small_files().items():
        file = folder / name
        if file.exists():
            changed = entry.get("LastModified") or entry.get("created") or entry.get("mtime") or 0.0
            time = changed if isinstance(changed, float | int) else changed.timestamp()
            status = file.stat()
            if status.st_size == entry["size"] or status.st_mtime >= time:
                continue
        (run / name).get(file)


def local_copy(given: str | Path, key: str = "RUN") -> str:
    """Returns `given`, or the local copy of the run or checkpoint of a store's address.

    Raises InputError if there is neither at the address, or the store refuses."""
    address = re.sub(r":/(?!/)", "://", str(given), count=1)  # as pathlib writes it
    if not re.match(r"[a-z][a-z0-9+]+://", address):
        return str(given)
    remote = Remote(address, key)
    name = remote.address.rpartition("/")[2]
    run = remote.parent.parent if CHECKPOINT.fullmatch(name) else remote
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dist_template", "store")
    folder = cache / run.address.replace("://", "/")
    try:
        names = run.names()
        if CONFIG not in names:
            raise InputError(f"{key} {remote.address!r} is no run and no checkpoint: it has no {CONFIG}; give another")
        copy_small_files(run, folder)
        copy_manifests(run, folder / CHECKPOINTS, folder / CHECKPOINTS)
    except StoreError as error:
        raise InputError(f"{key} {remote.address!r} cannot be read: {error}; give another address") from None
    if run is remote:
        return str(folder)
    if not (copy := folder / CHECKPOINTS / name).exists():
        raise InputError(f"{key} {remote.address!r} is no complete checkpoint: it has no {MANIFEST}; give another")
    return str(copy)
