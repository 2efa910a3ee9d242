"""Run folders: names, placeholders, the newest run and its checkpoints.

<root>/<name>/<run id>/   config.yaml environment.json facts.json metrics.jsonl checkpoints/ samples.txt
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import commit, manifest
from ..checkpoint.formats import format_of
from ..cluster.launch import RUN_ID
from ..errors import InputError
from ..observe.report.plotly_js import PlotlyJs

MAX_NAME_BYTES = 255  # of one part of a path, on every file system of Linux and macOS
PLACEHOLDER = "{run}"  # replaced by the run folder in any string of the configuration


@dataclass
class RunConfig:
    """Where run folders are.

    Args:
        name: Name of the experiment; `last` is the newest run of this name.
        root: Folder of all runs.
        report: Write report.html at the end of `fit`. false leaves it to the verb `report`.
        plotly: Where report.html loads plotly.js (5 MB) from. shared: one file in `root` for all runs; inline: the page
            contains it and is one file; cdn: plotly's CDN, which needs a network.
    """

    name: str = "default"
    root: str = "runs"
    report: bool = True
    plotly: PlotlyJs = "shared"

    def check(self, writes: bool) -> None:
        """Checks that the run folder can be made; leaves nothing on the disk.

        Args:
            writes: Whether the run's folder will be written.

        Raises:
            InputError: the name leaves the root, or the folder cannot be made or written.
        """
        for key, path in (("run.name", self.name), ("run.root", self.root)):
            if "\0" in path or any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in Path(path).parts):
                raise InputError(
                    f"{key} {_shortened(path)!r} is no folder's name: each part of it may have {MAX_NAME_BYTES} bytes"
                    " and no NUL character"
                )
        name = Path(self.name)
        if not name.parts or name.is_absolute() or ".." in name.parts:
            raise InputError(
                f"run.name {self.name!r} is not a folder below run.root: give a name such as `baseline` or"
                " `sweep/lr-3e-4`, and the folder of all runs as run.root"
            )
        if not writes:
            return
        check_writable("run.root", self.root, self.parent)

    @property
    def parent(self) -> Path:
        return Path(self.root) / self.name


def check_writable(key: str, given: str, folder: Path) -> None:
    """Makes and removes a temporary folder in `folder`, or in its nearest existing parent.

    Raises:
        InputError: it cannot be made: no permission, a file in the way, a read-only file system, no inode left.
    """
    existing = next(one for one in (folder, *folder.absolute().parents) if os.path.lexists(one))
    try:
        tempfile.TemporaryDirectory(prefix=".writable-", dir=existing).cleanup()
        if not shutil.disk_usage(existing).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise InputError(
            f"{key} {given!r} cannot be written: {existing}: {error.strerror}; give another folder"
        ) from error


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


def new_run(config: RunConfig) -> Path:
    """Returns a new run folder, the same on every rank; it is created at the first write.

    After a restart by a launcher or scheduler, which set the run's id, it is the same folder as before.
    """
    run_id = os.environ.get(RUN_ID) or os.environ.get("SLURM_JOB_ID")
    if not run_id:
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    os.environ[RUN_ID] = run_id
    return config.parent / run_id


def newest_run(config: RunConfig, dirpath: str) -> Path:
    """Returns the run of this name with the newest checkpoint.

    Args:
        config: Where runs are.
        dirpath: Folder of a run's checkpoints, with "{run}" in it.

    Raises:
        InputError: no run has a valid checkpoint.
    """
    if not (written := _last_writes(config, dirpath)):
        raise InputError(
            f"there is no checkpoint under {config.parent}/*/checkpoints; "
            "train first, or set run.name and run.root to where the run is"
        )
    return max(written, key=lambda run: written[run])


def _last_writes(config: RunConfig, dirpath: str) -> dict[Path, float]:
    """Returns {run: time of its newest checkpoint}, without runs that have none."""
    folders = {run: Path(fill_placeholders(dirpath, run)) for run in sorted(config.parent.glob("*"))}
    return {run: manifest.read(path)["time"] for run, folder in folders.items() if (path := commit.newest(folder))}


def has_checkpoint(settings: Any) -> bool:
    """Returns whether a run of run.name has a checkpoint."""
    return bool(_last_writes(RunConfig(**vars(settings.run)), settings.last_checkpoint.dirpath))


def newest_checkpoint(which: str, settings: Any) -> tuple[Path, Path]:
    """Returns the newest run of run.name, and its best checkpoint or the folder of all its checkpoints.

    Args:
        which: `best`, `last` or `best or last`.
        settings: The configuration, with "{run}" in it.

    Raises:
        InputError: no run has a checkpoint, or the newest has no best one.
    """
    last, best = settings.last_checkpoint, settings.best_checkpoint
    run = newest_run(RunConfig(**vars(settings.run)), last.dirpath)
    ranked = manifest.ranked(Path(fill_placeholders(best.dirpath, run)), best.mode)
    if which == "best" and not ranked:
        raise InputError(f"{run} has no best-*.ckpt: give `last`, or train with best_checkpoint.keep 1 and validations")
    return run, ranked[0] if ranked and which != "last" else Path(fill_placeholders(last.dirpath, run))


def check_checkpoint(path: Path, key: str = "--ckpt_path") -> None:
    """Checks that `path` can be a checkpoint, before anything is built; its content is verified later.

    Raises:
        InputError: it does not exist, is damaged, or is neither a checkpoint nor a folder of checkpoints.
    """
    if not path.exists():
        raise InputError(
            f"{key} {str(path)!r} does not exist; give a checkpoint, or `last` or `best` of the newest run"
        )
    if manifest.found(path):
        if all(manifest.torn(one) for one in manifest.found(path)):
            raise InputError(f"{key} {str(path)!r} holds damaged checkpoints only: {_told(path)}; give another")
    elif manifest.is_ours(path) and (why := manifest.torn(path)):
        raise InputError(f"{key} {str(path)!r} is damaged: {why}; give another, or `last` for the newest valid one")
    elif format_of(path) is None:
        inside = path / "checkpoints"
        hint = f"{inside}" if manifest.found(inside) else "another"
        raise InputError(f"{key} {str(path)!r} is not a checkpoint, or only part of one; give {hint}, or `last`")


def goes_on(folder: Path) -> bool:
    """Returns whether the run with its checkpoints in `folder` can be resumed.

    Raises:
        InputError: all checkpoints are damaged; starting again would hide it.
    """
    if not manifest.found(folder):
        return False
    if commit.newest(folder) is None:
        raise InputError(
            f"the checkpoints of this run, in {folder}, are all damaged: {_told(folder)};"
            " move the folder away to begin anew, or set another run.name"
        )
    return True


def _told(folder: Path) -> str:
    return ", ".join(f"{path.name} ({manifest.torn(path)})" for path in manifest.found(folder))


def fill_placeholders(value: Any, run: Path) -> Any:
    """Returns the configuration with every "{run}" replaced by the run folder."""
    if isinstance(value, str):
        return value.replace(PLACEHOLDER, str(run))
    if isinstance(value, list):
        return [fill_placeholders(item, run) for item in value]
    if isinstance(value, dict | Namespace):
        pairs = value.items() if isinstance(value, dict) else vars(value).items()
        return type(value)(**{key: fill_placeholders(item, run) for key, item in pairs})
    return value
