"""Launchers and schedulers: each is a module with the functions of `Target`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from ..job import Job

ON_HOSTS = ("torchrun", "deepspeed", "accelerate", "ssh")  # they start the nodes in `cluster`
TARGETS = (*ON_HOSTS, "slurm", "kubernetes", "ray")


class Target(Protocol):
    """A launcher or scheduler. `folder` is RUN/launch, `record` the content of its launch.json."""

    def render(self, job: Job) -> dict[str, str]:
        """Returns the files by name. Raises InputError if the target cannot run the job."""

    def commands(self, job: Job) -> list[list[str]]:
        """Returns the commands by which `submit` starts the job, after its checks."""

    def submit(self, job: Job, folder: Path) -> str:
        """Returns the scheduler's identifier of the job; "" from a launcher, when all has ended.

        Raises InputError if the job is refused, and Ended with another code than 0."""

    def is_active(self, record: dict[str, Any], folder: Path) -> bool:
        """Returns whether the launch waits or runs; False if nothing answers about it."""

    def status(self, record: dict[str, Any], folder: Path) -> str: ...

    def logs(self, record: dict[str, Any], folder: Path) -> str: ...

    def stop(self, record: dict[str, Any], folder: Path) -> str:
        """Asks the run to save and exit with 75; returns what was done."""


def target(name: str) -> Target:
    """Imports and returns the target `name`, one of TARGETS."""
    return cast(Target, import_module(f"{__name__}.{name}"))
