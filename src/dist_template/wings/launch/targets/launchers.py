"""The launchers of accelerate and DeepSpeed, each started on every node.

Their own ways to other nodes are not used: pdsh and mpirun lose exit codes and signals. node.sh
starts a node's launcher below ranks.py, which passes both on."""

import shlex

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
        files["accelerate.yaml"] = yaml.safe_dump(config, sort_keys=False)
        return files


class Deepspeed(OnNodes):
    """DeepSpeed's launcher on every node, with a hostfile."""

    takes_slots = True

    def render(self, job: Job) -> dict[str, str]:
        require("deepspeed", "--on deepspeed")
        hostfile, include = _hosts(job)
        launcher = ["deepspeed.launcher.runner", "--no_ssh", "--log_level=error"]
        launcher += ["--hostfile", str(job.files / "hostfile")]
        launcher += ["--master_addr", job.master, "--master_port", str(job.port)]
        if include:
            launcher.append(f"--include={include}")
        process = ["--no_local_rank", "--module", job.package, *arguments(job)]
        files = script(job, _start(job, launcher, "node_rank", process))
        files["hostfile"] = hostfile
        return files


def _hosts(job: Job) -> tuple[str, str]:
    """Returns the hostfile of the job's own nodes and devices, in the order of NODE_RANK, and the
    slots to include; "" for the first ones of each host.

    The user's hostfile may have more nodes than cluster.nodes, for which the launcher's ranks would
    wait, and a host may be user@name, which the syntax of --include cannot say."""
    slots = job.site.slots()
    lines, included, are_first = [], [], True
    for host in job.hosts or ["localhost"]:
        used = list(slots.get(host) or range(job.devices))[: job.devices]
        if used != list(range(len(used))):
            are_first = False
        lines.append(f"{host} slots={max(used) + 1}\n")
        included.append(f"{host}:{','.join(map(str, used))}")
    hostfile = "".join(lines)
    if are_first:
        return hostfile, ""
    return hostfile, "@".join(included)


def _start(job: Job, launcher: list[str], rank_flag: str, process: list[str]) -> str:
    """Returns the shell command of a node: a launcher below ranks.py, with the node's number."""
    words = [job.python, "-m", RANKS, job.python, "-m", *launcher]
    return f'{shlex.join(words)} --{rank_flag} "$NODE_RANK" {shlex.join(process)}'
