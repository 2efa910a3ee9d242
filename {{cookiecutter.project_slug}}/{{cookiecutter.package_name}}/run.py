"""A run's folder: where everything that one training writes is found, and how the newest is found again.

<root>/<name>/<run id>/   config.yaml environment.json facts.json metrics.jsonl checkpoints/ tensorboard/ samples.txt
"""

from __future__ import annotations

import json
import os
import secrets
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import commit, manifest
from .checkpoint.formats import format_of
from .cluster.environment import environment
from .errors import InputError
from .history.run import DEFAULTS, RUN_ID

PLACEHOLDER = "{run}"  # stands for the run's folder in any string of the configuration


@dataclass
class RunConfig:
    """Where runs are kept.

    Args:
        name: What is being tried; runs of one name lie side by side, and `last` looks among them.
        root: Folder of all runs.
        report: Write report.html (5 MB) and report.md at the end of `fit`. false leaves it to the verb `report`.
    """

    name: str = "default"
    root: str = "runs"
    report: bool = True

    @property
    def parent(self) -> Path:
        return Path(self.root) / self.name


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
    written: dict[Path, float] = {}
    for run in sorted(config.parent.glob("*")):
        if newest := commit.newest(Path(fill_placeholders(dirpath, run))):
            written[run] = manifest.read(newest)["time"]
    if not written:
        raise InputError(
            f"--ckpt_path last found no checkpoint under {config.parent}/*/checkpoints; "
            "train first, or set run.name and run.root to where the run is"
        )
    return max(written, key=lambda run: written[run])


def check_checkpoint(path: Path, key: str = "--ckpt_path") -> None:
    """Refuse a checkpoint that is not there or cannot be one, before anything is built; its bytes are read later.

    Raises:
        InputError: nothing is at `path`, or it is none of a checkpoint, a folder of this project's, or a file that
            torch.save wrote whole.
    """
    if not path.exists():
        raise InputError(f"{key} {str(path)!r} does not exist; give a checkpoint, or `last` for the newest")
    if manifest.found(path):
        if all(manifest.torn(one) for one in manifest.found(path)):
            raise InputError(f"{key} {str(path)!r} holds damaged checkpoints only: {_told(path)}; give another")
    elif manifest.is_ours(path) and (why := manifest.torn(path)):
        raise InputError(f"{key} {str(path)!r} is damaged: {why}; give another, or `last` for the newest valid one")
    elif format_of(path) is None:
        raise InputError(f"{key} {str(path)!r} is not a checkpoint, or only part of one; give another, or `last`")


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


def write_record(run: Path, config_yaml: str, defaults_yaml: str) -> None:
    """Write config.yaml and environment.json; a resumed run keeps the earlier ones beside them, numbered.

    And defaults.yaml, the same keys as nobody has set them, for the report.
    """
    run.mkdir(parents=True, exist_ok=True)
    (run / DEFAULTS).write_text(defaults_yaml, encoding="utf-8")
    for name, text in (("config.yaml", config_yaml), ("environment.json", json.dumps(environment(), indent=2))):
        write_numbered(run / name, text)


def write_numbered(path: Path, text: str) -> None:
    """Write a file of the run's, whole or not at all; an earlier attempt's is kept, as `<name>.<n>.<ending>`."""
    aside = path.parent / f".{path.name}.tmp"
    aside.write_text(text, encoding="utf-8")
    if path.exists():
        earlier = len(list(path.parent.glob(f"{path.stem}.*{path.suffix}")))
        path.rename(path.parent / f"{path.stem}.{earlier}{path.suffix}")
    aside.rename(path)
