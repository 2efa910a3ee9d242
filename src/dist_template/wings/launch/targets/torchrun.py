"""torchrun: launch/torchrun.sh on every node, with this run's settings."""

from __future__ import annotations

import shlex

from ..job import Job, project_file
from ..nodes import arguments, commands, is_active, logs, script, status, stop, submit

__all__ = ["commands", "is_active", "logs", "render", "status", "stop", "submit"]


def render(job: Job) -> dict[str, str]:
    start = f"bash {project_file('launch/torchrun.sh')} {shlex.join(arguments(job))}"
    nodes = f"{job.site.min_nodes}:{job.nodes}" if job.site.min_nodes else str(job.nodes)
    settings = {"PYTHON": job.python, "DIST_PACKAGE": job.package, "NPROC": str(job.devices)}
    settings["NNODES"] = nodes
    if nodes != "1":
        settings["RDZV_ENDPOINT"] = f"{job.master}:{job.port}"
    return script(job, start, settings)
