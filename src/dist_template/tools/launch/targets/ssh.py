"""ssh: one process per node, whose Lightning starts the other processes of its node."""

from __future__ import annotations

import shlex

from ..job import Job
from ..nodes import arguments, check, logs, script, status, stop, submit

__all__ = ["check", "logs", "render", "status", "stop", "submit"]


def render(job: Job) -> dict[str, str]:
    words = [job.python, "-m", job.package, *arguments(job)]
    rendezvous = {"MASTER_ADDR": job.master, "MASTER_PORT": str(job.port)}
    return script(job, "ssh", shlex.join(words), rendezvous)
