"""Ray Train: a TorchTrainer whose workers each run one process of a verb.

Lightning's strategies of Ray know no TP, EP or ZeRO, and Ray Train calls a worker's function in a
thread, where Python handles no signals. So each worker starts a process with torchrun's variables;
Ray places and restarts the workers, and a restarted run resumes from its own checkpoint.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module

from ....cluster.launch import Variable
from ....cluster.signals import end_with_parent
from ....errors import Exit, require
from ..job import Job
from ..nodes import OnNodes, script

MAX_RESTARTS = 3  # as in launch/torchrun.sh
OTHERS_S = 7 * 86_400  # a worker whose process has exited waits for the other workers' processes


class Ray(OnNodes):
    """Runs the driver here, for the cluster at RAY_ADDRESS, or for this machine without it."""

    on_hosts = False

    def render(self, job: Job) -> dict[str, str]:
        """Returns node.sh, whose command is the driver: `main` with the command of a process."""
        device = "cpu" if job.accelerator == "cpu" else "gpu"
        settings = [f"{name}={value}" for name, value in job.environment.items()]
        process = ["env", f"--chdir={job.folder}", *settings, job.python, "-m", job.package, *job.arguments]
        driver = [job.python, "-m", __name__, str(job.nodes * job.devices), device]
        return script(job, shlex.join([*driver, *process]))

    def check(self, job: Job) -> None:
        require("ray", "launch --on ray")
        super().check(job)


def main(workers: str, device: str, *process: str) -> int:
    """Runs a process in each worker; returns their common exit code."""
    train, torch = import_module("ray.train"), import_module("ray.train.torch")
    launch = f"ray {socket.gethostname()} {os.getpid()}"
    trainer = torch.TorchTrainer(
        work,
        train_loop_config={"process": process, "launch": launch},
        torch_config=torch.TorchConfig(backend="gloo", timeout_s=OTHERS_S),
        scaling_config=train.ScalingConfig(num_workers=int(workers), use_gpu=device == "gpu"),
        run_config=train.RunConfig(failure_config=train.FailureConfig(max_failures=MAX_RESTARTS)),
    )
    return trainer.fit().return_value


def work(config: Mapping[str, str]) -> int:
    """Runs a process in a worker of Ray.

    Raises:
        RuntimeError: processes have failed; Ray restarts all workers.
    """
    import torch.distributed as dist

    with socket.socket() as probe:  # MASTER_PORT is in use by Ray's own process group
        probe.bind(("", 0))
        port = [probe.getsockname()[1]]
    dist.broadcast_object_list(port)
    environment = os.environ | {"MASTER_PORT": str(port[0]), "GROUP_RANK": os.environ["NODE_RANK"]}
    environment |= {Variable.LAUNCH: config["launch"], "TORCHELASTIC_RUN_ID": config["launch"]}
    # If Ray kills the worker, the process saves and exits (signals.listen).
    started = subprocess.Popen(config["process"], env=environment, preexec_fn=end_with_parent)
    codes = [0] * dist.get_world_size()
    dist.all_gather_object(codes, started.wait())
    if any(codes) and not Exit.is_deliberate(codes):
        raise RuntimeError(f"the processes exited with {codes}")
    return int(Exit.of_all(codes))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
