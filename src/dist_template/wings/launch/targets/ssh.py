"""ssh: a process on each node, whose Lightning starts the node's other processes."""

from __future__ import annotations

import shlex

from ..job import Job
from ..nodes import arguments, commands, is_active, logs, script, status, stop, submit

__all__ = ["commands", "is_active", "logs", "render", "status", "stop", "submit"]


def render(job: Job) -> dict[str, str]:
    rendezvous = {"MASTER_ADDR": job.master, "MASTER_PORT": str(job.port)}
    return script(job, shlex.join([job.python, "-m", job.package, *arguments(job)]), rendezvous)
