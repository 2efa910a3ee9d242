"""deepspeed: its launcher on every node, with a hostfile.

The launcher's own way to the nodes is pdsh, which loses exit codes; here it starts one node.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from ....errors import require
from ..job import Job
from ..nodes import RANKS, arguments, commands, is_active, logs, script, status, stop, submit

__all__ = ["commands", "is_active", "logs", "render", "status", "stop", "submit"]


def render(job: Job) -> dict[str, str]:
    require("deepspeed", "--on deepspeed")
    hostfile = "".join(f"{host} slots={job.devices}\n" for host in job.hosts or ["localhost"])
    if job.site.hostfile:
        hostfile = Path(job.site.hostfile).read_text(encoding="utf-8")
    launcher = [job.python, "-m", RANKS, job.python, "-m", "deepspeed.launcher.runner", "--no_ssh"]
    launcher += ["--hostfile", str(job.files / "hostfile"), "--log_level=error"]
    launcher += ["--master_addr", job.master, "--master_port", str(job.port)]
    launcher += [f"--include={job.site.include}", f"--exclude={job.site.exclude}"]
    process = ["--no_local_rank", "--module", job.package, *arguments(job)]
    start = f'{shlex.join(launcher)} --node_rank "$NODE_RANK" {shlex.join(process)}'
    return {**script(job, start, {}), "hostfile": hostfile}
