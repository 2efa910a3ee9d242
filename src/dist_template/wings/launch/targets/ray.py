"""Ray Train: a TorchTrainer whose workers each start a process of a verb, with torchrun's
variables.

Ray calls a worker's function in a thread, where Python handles no signals. It places and restarts
the workers; a restarted run resumes from its own checkpoint."""

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
from ...values import free_port
from ..job import Job
from ..nodes import OnNodes, script


class Ray(OnNodes):
    """Runs the driver here, for the cluster at RAY_ADDRESS, or for this machine without it."""

    on_hosts = False

    def render(self, job: Job) -> dict[str, str]:
        """Returns node.sh, whose command is the driver: `main` with the command of a process."""
        settings = [f"{name}={value}" for name, value in job.environment.items()]
        process = ["env", f"--chdir={job.folder}"] + settings
        process += [job.python, "-m", job.package] + job.arguments
        driver = [job.python, "-m", __name__, str(job.nodes * job.devices), job.accelerator]
        return script(job, shlex.join(driver + process))

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
        # a week: a worker whose process has exited waits for the other workers' processes
        torch_config=torch.TorchConfig(backend="gloo", timeout_s=7 * 86_400),
        scaling_config=train.ScalingConfig(num_workers=int(workers), use_gpu=device != "cpu"),
        run_config=train.RunConfig(failure_config=train.FailureConfig(max_failures=3)),
    )
    return trainer.fit().return_value


def work(config: Mapping[str, str]) -> int:
    """Runs a process in a worker of Ray, which restarts all workers after a RuntimeError."""
    import torch.distributed as dist

    port = [free_port()]  # MASTER_PORT is in use by Ray's own process group
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
