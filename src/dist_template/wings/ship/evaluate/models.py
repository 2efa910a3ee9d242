"""The models that `evaluate` runs, and the verbs that it runs them by."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from ....cli.run import verified_checkpoint
from ....cluster.signals import end_with_parent
from ....project import Project
from ..export import trained


class Model(NamedTuple):
    """A run's configuration with a checkpoint, "start", or the weights of a folder or the hub."""

    name: str
    run: Path
    checkpoint: str = "start"
    folder: str | None = None


def find(name: str, project: Project, run: Path | None = None) -> Model:
    """Finds the model of RUN, or of `--baseline`: a folder is then evaluated on the data of
    `run`."""
    if run and name == "start":
        return Model(name, run)
    if run and trained.is_pretrained(name):
        return Model(name, run, folder=name)
    flag = "--baseline" if run else "RUN"
    _, path, found = trained.of_run(name, project, flag)
    return Model(name, found, str(verified_checkpoint(path, flag)))


def run_verb(project: Project, argv: list[str]) -> int:
    """Runs a verb in a process of its own, which starts the other ranks; returns its exit code."""
    command = [sys.executable, "-m", project.package, *argv]
    return subprocess.call(command, preexec_fn=end_with_parent)
