"""accelerate: `accelerate launch` on every node, with a rendered configuration."""

from __future__ import annotations

import shlex

import yaml

from ....errors import require
from ..job import Job
from ..nodes import RANKS, arguments, commands, is_active, logs, script, status, stop, submit

__all__ = ["commands", "is_active", "logs", "render", "status", "stop", "submit"]


def render(job: Job) -> dict[str, str]:
    require("accelerate", "--on accelerate")
    config = {
        "compute_environment": "LOCAL_MACHINE",
        # The processes' devices are trainer.accelerator's: with MULTI_CPU it would need mpirun.
        "distributed_type": "MULTI_GPU",
        "num_machines": job.nodes,
        "num_processes": job.nodes * job.devices,
        "main_process_ip": job.master,
        "main_process_port": job.port,
        "rdzv_backend": "static",
        "mixed_precision": "no",
        "use_cpu": False,
    }
    launcher = [job.python, "-m", RANKS, job.python, "-m", "accelerate.commands.launch"]
    launcher += ["--config_file", str(job.files / "accelerate.yaml")]
    process = ["-m", job.package, *arguments(job)]
    start = f'{shlex.join(launcher)} --machine_rank "$NODE_RANK" {shlex.join(process)}'
    files = script(job, start, {})
    return {**files, "accelerate.yaml": yaml.safe_dump(config, sort_keys=False)}
