"""torchrun: launch/torchrun.sh on every node, with this run's settings."""

from __future__ import annotations

import shlex

from ....errors import InputError
from .. import nodes
from ..job import Job
from ..nodes import logs, status, stop, submit

__all__ = ["check", "logs", "render", "status", "stop", "submit"]

SCRIPT = "launch/torchrun.sh"


def check(job: Job) -> None:
    """Checks what torchrun needs.

    Raises:
        InputError: the script is not there, or nodes have no names.
    """
    nodes.check(job)
    if not (job.folder / SCRIPT).is_file():
        raise InputError(f"{job.folder} has no {SCRIPT}; start `launch` in the project's folder")


def render(job: Job) -> dict[str, str]:
    least = job.site.min_nodes
    settings = {"PYTHON": job.python, "NPROC": str(job.devices)}
    settings["NNODES"] = f"{least}:{job.nodes}" if least else str(job.nodes)
    if job.nodes > 1:
        settings["RDZV_ENDPOINT"] = f"{job.master}:{job.port}"
    start = f"bash {SCRIPT} {shlex.join(nodes.arguments(job))}"
    return nodes.script(job, "torchrun", start, settings)
