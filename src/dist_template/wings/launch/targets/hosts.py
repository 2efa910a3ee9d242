"""Launchers that start a process, or another library's launcher, on each node."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml

from ....errors import require
from ..job import Job, project_file
from ..nodes import OnNodes, arguments, script

RANKS = "dist_template.wings.launch.ranks"  # runs another library's launcher


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


class Deepspeed(OnNodes):
    """DeepSpeed's launcher on every node, with a hostfile.

    Its own way to the nodes is pdsh, which loses exit codes; here it starts one node."""

    def render(self, job: Job) -> dict[str, str]:
        require("deepspeed", "--on deepspeed")
        hostfile = "".join(f"{host} slots={job.devices}\n" for host in job.hosts or ["localhost"])
        if job.site.hostfile:
            hostfile = Path(job.site.hostfile).read_text(encoding="utf-8")
        launcher = ["deepspeed.launcher.runner", "--no_ssh", "--log_level=error"]
        launcher += ["--hostfile", str(job.files / "hostfile")]
        launcher += ["--master_addr", job.master, "--master_port", str(job.port)]
        launcher += [f"--include={job.site.include}", f"--exclude={job.site.exclude}"]
        process = ["--no_local_rank", "--module", job.package, *arguments(job)]
        return {**script(job, _start(job, launcher, "node_rank", process)), "hostfile": hostfile}


class Accelerate(OnNodes):
    """`accelerate launch` on every node, with a rendered configuration."""

    def render(self, job: Job) -> dict[str, str]:
        require("accelerate", "--on accelerate")
        config = {
            "compute_environment": "LOCAL_MACHINE",
            # The processes' devices are trainer.accelerator's: MULTI_CPU would need mpirun.
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


def _start(job: Job, launcher: list[str], rank_flag: str, process: list[str]) -> str:
    """Returns a shell command: another library's launcher, below ranks.py."""
    launcher = [job.python, "-m", RANKS, job.python, "-m", *launcher]
    return f'{shlex.join(launcher)} --{rank_flag} "$NODE_RANK" {shlex.join(process)}'
