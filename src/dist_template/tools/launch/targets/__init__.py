"""Launchers and schedulers, each a module with the functions of `Target`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from ..job import Job

ON_HOSTS = ("torchrun", "deepspeed", "accelerate", "ssh")  # they start the nodes in `cluster`
TARGETS = (*ON_HOSTS,)


class Target(Protocol):
    """What a launcher or scheduler does with a run; `folder` is RUN/launch with the files."""

    def check(self, job: Job) -> None:
        """Raises InputError if the job cannot be described to the target; starts nothing."""

    def render(self, job: Job) -> dict[str, str]:
        """Returns the files by name; what ends in .sh becomes executable."""
        raise NotImplementedError

    def submit(self, job: Job, folder: Path) -> str:
        """Submits the files. Returns the target's identifier of the job, "" for none.

        A launcher in the foreground returns when the run has ended.

        Raises:
            InputError: a node or the scheduler refuses it.
            Ended: the run has ended with another code than 0.
        """
        raise NotImplementedError

    def status(self, record: dict[str, Any], folder: Path) -> str:
        """Returns a line for each node or job; `record` is RUN/launch/launch.json."""
        raise NotImplementedError

    def logs(self, record: dict[str, Any], folder: Path) -> str:
        """Returns the output so far."""
        raise NotImplementedError

    def stop(self, record: dict[str, Any], folder: Path) -> str:
        """Asks the run to save and to exit with 75. Returns what was done."""
        raise NotImplementedError


def target(name: str) -> Target:
    """Imports and returns the target `name`, one of TARGETS."""
    return cast(Target, import_module(f"{__name__}.{name}"))
