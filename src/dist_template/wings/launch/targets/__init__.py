"""Targets of `launch`: launchers and schedulers, found by the entry points of GROUP."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TypedDict

from ....errors import InputError, first_line
from ....plugins import registered
from ..job import Job

GROUP = "dist_template.launch_targets"


class Record(TypedDict):
    """The content of a run's launch.json."""

    on: str  # the target's name
    id: str  # the scheduler's identifier of the job; "" from a launcher
    hosts: list[str]
    ssh: str


class Target(ABC):
    """A launcher or scheduler. `folder` is RUN/launch, `record` the content of its launch.json."""

    on_hosts = False  # True: it starts the nodes that `cluster` names; False: a scheduler does

    @abstractmethod
    def render(self, job: Job) -> dict[str, str]:
        """Returns the files by name. Raises InputError if the target cannot run the job."""

    @abstractmethod
    def commands(self, job: Job) -> list[list[str]]:
        """Returns the commands that start the job."""

    def check(self, job: Job) -> None:  # noqa: B027  (optional)
        """Raises InputError if the job cannot start now; nothing is written yet."""

    def submit(self, job: Job) -> str:
        """Starts the job, after its files are written. Returns the scheduler's identifier of it; a
        launcher returns "" when all processes have ended. By default the command prints it.

        Raises InputError if the job is refused, and Ended with another code than 0."""
        return ask(*self.commands(job)[0])

    @abstractmethod
    def status(self, record: Record, folder: Path) -> str:
        """Returns the state of the job."""

    @abstractmethod
    def stop(self, record: Record, folder: Path) -> str:
        """Asks the run to save and exit with 75; returns what was done."""

    def logs(self, record: Record, folder: Path) -> str:
        """Returns the output of the run: by default, of all `*.log` files in the folder."""
        files = sorted(folder.glob("*.log"))
        return "\n".join(f"{file}:\n{file.read_text(encoding='utf-8')}" for file in files)


def ask(*words: str) -> str:
    """Returns what a scheduler's command prints.

    Raises:
        InputError: the command is not installed here, or it fails.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        what = f"there is no {words[0]} on this machine"
        raise InputError(f"{what}; start it where {words[0]} is, or give --dry-run") from error
    if done.returncode:
        raise InputError(f"{words[0]} fails: {first_line(done.stderr)}")
    return done.stdout.rstrip()


def target(name: str) -> Target:
    """Creates the target that is registered as `name`.

    Raises:
        InputError: no package registers it, or its package cannot be imported.
    """
    known = registered(GROUP)
    if name not in known:
        raise InputError(f"{name!r} is no target of launch; allowed are {', '.join(known)}")
    try:
        return known[name].load()()
    except (ImportError, AttributeError, TypeError) as error:
        raise InputError(f"target {name} ({known[name].value}) cannot be used: {error}") from error
