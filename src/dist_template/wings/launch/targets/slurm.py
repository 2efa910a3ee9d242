"""Slurm: sbatch with launch/slurm.sh; its #SBATCH lines are the defaults, this run's options
override them."""

import re
import shlex
from pathlib import Path

from ..job import Job, exports, project_file
from . import Record, Target, ask


class Slurm(Target):
    """A job of Slurm; launch/slurm.sh adds its sizes to the flags, and requeues it."""

    def render(self, job: Job) -> dict[str, str]:
        text = Path(project_file("launch/slurm.sh")).read_text(encoding="utf-8")
        lines = ["#!/usr/bin/env bash"]
        lines += re.findall(r"^#SBATCH --(?!gpus-per-node).*$", text, re.MULTILINE)
        image, container = job.site.image, job.site.container
        mounts = ",".join([f"{job.folder}:{job.folder}", *job.site.mounts])
        settings = {"PYTHON": "python" if container else job.python}  # the image has its own
        if container == "pyxis":
            flags = f"--container-image={image} --container-mounts={mounts}"
            settings["SRUN_FLAGS"] = f"{flags} --container-workdir={job.folder}"
        elif container:
            gpu = "--nv " if job.accelerator == "cuda" else ""
            command = f"apptainer exec {gpu}--bind {mounts} --pwd {job.folder} {image}"
            settings["CONTAINER"] = command
        settings["DIST_PACKAGE"] = job.package
        settings |= job.environment
        lines += [f"cd {shlex.quote(str(job.folder))}", exports(settings)]
        lines.append("# Each task of an array is a run.")
        lines.append("export DIST_RUN_ID=$DIST_RUN_ID${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}")
        lines.append(f"exec bash {shlex.join(['launch/slurm.sh', job.verb, *job.flags])}\n")
        return {"job.sh": "\n".join(lines)}

    def commands(self, job: Job) -> list[list[str]]:
        """Returns the command with the job's sizes and cluster.options, by their long names."""
        site = job.site
        options: dict[str, object] = {"job-name": f"{job.run.parent.name}-{job.run.name}"}
        options |= {"output": f"{job.files}/slurm-%j.log", "signal": f"SIGUSR1@{site.save_s}"}
        options |= {"nodes": job.nodes, "ntasks-per-node": job.devices}
        if job.accelerator == "cuda" and "gres" not in site.options:
            options["gpus-per-node"] = job.devices
        if site.partition:
            options["partition"] = site.partition
        limit = site.time_limit_s
        if limit is not None:
            options["time"] = f"{limit // 3600}:{limit // 60 % 60:02}:{limit % 60:02}"
        words = ["sbatch", "--parsable"]
        for name, value in (options | site.options).items():
            words.append(f"--{name}" if value in (None, "") else f"--{name}={value}")
        return [[*words, str(job.files / "job.sh")]]

    def check(self, job: Job) -> None:
        """Raises InputError if the data is not prepared, unless an earlier job prepares it."""
        if "dependency" not in job.site.options:
            job.require_data()

    def submit(self, job: Job) -> str:
        return super().submit(job).partition(";")[0]

    def status(self, record: Record, folder: Path) -> str:
        columns = ["-o", "%i %T, %M, %R"]
        return ask("squeue", "--noheader", "--states=all", f"--jobs={record['id']}", *columns)

    def stop(self, record: Record, folder: Path) -> str:
        """Lets a running job save and exit without being requeued; a pending one is cancelled."""
        number = record["id"]
        ask("scontrol", "update", f"jobid={number}", "requeue=0")
        ask("scancel", "--state=PENDING", number)
        ask("scancel", "--signal=USR1", number)
        return f"job {number} was asked to save and exit"
