"""The launchers of accelerate and DeepSpeed, each started on every node.

Their own ways to other nodes are not used: pdsh and mpirun lose exit codes and signals. node.sh
starts a node's launcher below ranks.py, which passes both on."""

import shlex
from pathlib import Path

import yaml

from ....errors import require
from ..job import Job
from ..nodes import OnNodes, arguments, script

RANKS = "dist_template.wings.launch.ranks"


class Accelerate(OnNodes):
    """`accelerate launch` on every node, with a rendered configuration."""

    def render(self, job: Job) -> dict[str, str]:
        require("accelerate", "--on accelerate")
        config = {
            "compute_environment": "LOCAL_MACHINE",
            # Of the launcher alone: the processes' devices are trainer.accelerator's. With
            # MULTI_CPU the launcher would call mpirun.
            "distributed_type": "MULTI_GPU",
            "num_machines": job.nodes,
            "num_processes": job.nodes * job.devices,
            "main_process_ip": job.master,
            "main_process_port": job.port,
            "rdzv_backend": "static",
            "mixed_precision": "no",
            "use_cpu": False,
        }
        launcher = ["accelerate.commands.launch", "--config_file"]
        launcher.append(str(job.files / "accelerate.yaml"))
        process = ["-m", job.package, *arguments(job)]
        files = script(job, _start(job, launcher, "machine_rank", process))
        return {**files, "accelerate.yaml": yaml.safe_dump(config, sort_keys=False)}


class Deepspeed(OnNodes):
    """DeepSpeed's launcher on every node, with a hostfile."""

    takes_slots = True

    def render(self, job: Job) -> dict[str, str]:
        require("deepspeed", "--on deepspeed")
        if job.site.hostfile:
            hostfile = Path(job.site.hostfile).read_text(encoding="utf-8")
        else:
            names = job.hosts or ["localhost"]
            hostfile = "".join(f"{host} slots={job.devices}\n" for host in names)
        launcher = ["deepspeed.launcher.runner", "--no_ssh", "--log_level=error"]
        launcher += ["--hostfile", str(job.files / "hostfile")]
        launcher += ["--master_addr", job.master, "--master_port", str(job.port)]
        launcher += [f"--include={job.site.include}", f"--exclude={job.site.exclude}"]
        process = ["--no_local_rank", "--module", job.package, *arguments(job)]
        return {**script(job, _start(job, launcher, "node_rank", process)), "hostfile": hostfile}


def _start(job: Job, launcher: list[str], rank_flag: str, process: list[str]) -> str:
    """Returns the shell command of a node: a launcher below ranks.py, with the node's number."""
    words = [job.python, "-m", RANKS, job.python, "-m", *launcher]
    return f'{shlex.join(words)} --{rank_flag} "$NODE_RANK" {shlex.join(process)}'
