"""Launchers that start a process, or torchrun, on each node."""

from __future__ import annotations

import shlex

from ..job import Job, project_file
from ..nodes import OnNodes, arguments, script


class Ssh(OnNodes):
    """A process on each node, whose Lightning starts the node's other processes."""

    def render(self, job: Job) -> dict[str, str]:
        rendezvous = {"MASTER_ADDR": job.master, "MASTER_PORT": str(job.port)}
        return script(job, shlex.join([job.python, "-m", job.package, *arguments(job)]), rendezvous)


class Torchrun(OnNodes):
    """launch/torchrun.sh on every node, with this run's settings."""

    def render(self, job: Job) -> dict[str, str]:
        start = f"bash {project_file('launch/torchrun.sh')} {shlex.join(arguments(job))}"
        nodes = f"{job.site.min_nodes}:{job.nodes}" if job.site.min_nodes else str(job.nodes)
        settings = {"PYTHON": job.python, "DIST_PACKAGE": job.package, "NPROC": str(job.devices)}
        settings["NNODES"] = nodes
        if nodes != "1":
            settings["RDZV_ENDPOINT"] = f"{job.master}:{job.port}"
        return script(job, start, settings)
