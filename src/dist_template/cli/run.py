"""A run's folder: where everything that one training writes is found, and how the newest is found again.

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
PLACEHOLDER = "{run}"  # stands for the run's folder in any string of the configuration


@dataclass
class RunConfig:
    """Where runs are kept.

    Args:
        name: What is being tried; runs of one name lie side by side, and `last` looks among them.
        root: Folder of all runs.
        report: Write report.html and report.md at the end of `fit`. false leaves it to the verb `report`.
        plotly: Where report.html loads plotly.js (5 MB) from. shared: one file in `root` for all runs; inline: the page
            contains it and is one file; cdn: plotly's CDN, which needs a network.
    """

    name: str = "default"
    root: str = "runs"
    report: bool = True
    plotly: PlotlyJs = "shared"

    def check(self, writes: bool) -> None:
        """Refuse a name or a root that is no folder of one's own; nothing is left on the disk.

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
    """Tries to make a folder in `folder`, or in the nearest one above it that exists, and removes it again.

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
    """A folder no other run has, the same on every rank; it is made when something is first written.

    A restart by the launcher or the scheduler, which have given the run its id, finds the folder of the run before.
    """
    run_id = os.environ.get(RUN_ID) or os.environ.get("SLURM_JOB_ID")
    if not run_id:
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    os.environ[RUN_ID] = run_id
    return config.parent / run_id


def newest_run(config: RunConfig, dirpath: str) -> Path:
    """The run of this name in which a checkpoint was written last.

    Args:
        config: Where runs are.
        dirpath: Where a run keeps its checkpoints, with "{run}" in it.

    Raises:
        InputError: no run has a checkpoint that is not torn.
    """
    if not (written := _last_writes(config, dirpath)):
        raise InputError(
            f"there is no checkpoint under {config.parent}/*/checkpoints; "
            "train first, or set run.name and run.root to where the run is"
        )
    return max(written, key=lambda run: written[run])


def _last_writes(config: RunConfig, dirpath: str) -> dict[Path, float]:
    """Run: when its newest checkpoint was written; without runs that have none."""
    folders = {run: Path(fill_placeholders(dirpath, run)) for run in sorted(config.parent.glob("*"))}
    return {run: manifest.read(path)["time"] for run, folder in folders.items() if (path := commit.newest(folder))}


def has_checkpoint(settings: Any) -> bool:
    """Whether a run of run.name has one."""
    return bool(_last_writes(RunConfig(**vars(settings.run)), settings.last_checkpoint.dirpath))


def newest_checkpoint(which: str, settings: Any) -> tuple[Path, Path]:
    """The newest run of run.name, and its checkpoint: `best`; `last`, the folder of all; or `best or last`.

    Args:
        which: One of the three.
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
    """Refuse a checkpoint that is not there or cannot be one, before anything is built; its bytes are read later.

    Raises:
        InputError: nothing is at `path`, or it is none of a checkpoint, a folder of this project's, or a file that
            torch.save wrote whole.
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
    """Whether a run that keeps its checkpoints in `folder` was interrupted, and has one to go on from.

    Raises:
        InputError: all that are there are damaged. To begin anew would hide it.
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
    """A configuration in which every "{run}" is the run's folder."""
    if isinstance(value, str):
        return value.replace(PLACEHOLDER, str(run))
    if isinstance(value, list):
        return [fill_placeholders(item, run) for item in value]
    if isinstance(value, dict | Namespace):
        pairs = value.items() if isinstance(value, dict) else vars(value).items()
        return type(value)(**{key: fill_placeholders(item, run) for key, item in pairs})
    return value
