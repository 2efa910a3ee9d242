"""Slurm: sbatch with launch/slurm.sh, whose #SBATCH lines get the values of this run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from ....errors import InputError
from ..job import Job, exports, project_file
from . import Record, Target, ask


class Slurm(Target):
    """A job of Slurm; launch/slurm.sh adds its sizes to the flags, and requeues it."""

    def render(self, job: Job) -> dict[str, str]:
        """Returns job.sh."""
        lines = ["#!/usr/bin/env bash"]
        for name, value in _options(job).items():
            if not re.fullmatch(r"[\w-]+", name) or not f"{value}".isprintable():
                what = "give a long name of sbatch, with a value of one line"
                raise InputError(f"cluster.options or partition has {name!r}: {value!r}; {what}")
            text = f"{value}"
            if not re.fullmatch(r"[^\s\"'\\#]+", text):  # words end at a blank, lines at a #
                text = '"' + re.sub(r'(["\\#])', r"\\\1", text) + '"'
            lines.append(f"#SBATCH --{name}" + ("" if value in (None, "") else f"={text}"))
        settings = {"PYTHON": "python" if job.site.container else job.python, **_container(job)}
        settings |= {"DIST_PACKAGE": job.package, **job.environment}
        lines += [f"cd {shlex.quote(str(job.folder))}", exports(settings)]
        lines.append("# Each task of an array is a run.")
        lines.append("export DIST_RUN_ID=$DIST_RUN_ID${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}")
        lines.append(f"exec bash {shlex.join(['launch/slurm.sh', job.verb, *job.flags])}\n")
        return {"job.sh": "\n".join(lines)}

    def commands(self, job: Job) -> list[list[str]]:
        return [["sbatch", "--parsable", str(job.files / "job.sh")]]

    def submit(self, job: Job, folder: Path) -> str:
        """Submits job.sh; returns the job's number.

        Raises:
            InputError: the data is not prepared, or sbatch refuses the job.
        """
        if "dependency" not in job.site.options:
            job.require_data()
        try:
            return ask(*self.commands(job)[0]).partition(";")[0]
        except InputError as error:
            if "generic resource" in str(error):
                why = "it has no such GPUs; give cluster.options.gres as the site spells it, or"
                raise InputError(f"{error}: {why} trainer.accelerator cpu") from error
            raise

    def is_active(self, record: Record, folder: Path) -> bool:
        """Returns whether the job is pending, running or suspended."""
        states = "--states=PENDING,RUNNING,SUSPENDED"
        number = record["id"]
        return number != "" and ask("squeue", "--noheader", states, f"--jobs={number}") != ""

    def status(self, record: Record, folder: Path) -> str:
        """Returns the state of the job, as long as Slurm remembers it."""
        columns = ["-o", "%i %T, %M, %R"]
        return ask("squeue", "--noheader", "--states=all", f"--jobs={record['id']}", *columns)

    def stop(self, record: Record, folder: Path) -> str:
        """Lets a running job save and exit without being requeued; a pending one is cancelled."""
        number = record["id"]
        ask("scontrol", "update", f"jobid={number}", "requeue=0")
        ask("scancel", "--state=PENDING", number)
        ask("scancel", "--signal=USR1", number)
        return f"job {number} was asked to save and exit"


def _options(job: Job) -> dict[str, object]:
    """Returns the options of sbatch by their long names: the script's, then this run's."""
    site, text = job.site, Path(project_file("launch/slurm.sh")).read_text(encoding="utf-8")
    options: dict[str, object] = {}
    options.update(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))
    options["job-name"] = f"{job.run.parent.name}-{job.run_id}"
    options["output"] = f"{job.files}/slurm-%j.log"
    options |= {"nodes": job.nodes, "ntasks-per-node": job.devices, "gpus-per-node": job.devices}
    options["signal"] = f"SIGUSR1@{site.save_s}"
    if job.accelerator != "cuda" or "gres" in site.options:
        del options["gpus-per-node"]
    if site.partition:
        options["partition"] = site.partition
    if (limit := site.time_limit_s) is not None:
        options["time"] = f"{limit // 3600}:{limit // 60 % 60:02}:{limit % 60:02}"
    return options | site.options


def _container(job: Job) -> dict[str, str]:
    """Returns the settings of launch/slurm.sh that run the tasks in the image."""
    if not job.site.container:
        return {}
    image, mounts = job.site.image, ",".join([f"{job.folder}:{job.folder}", *job.site.mounts])
    if re.search(r"\s", f"{image}{mounts}"):
        what = "launch/slurm.sh splits its words at blanks: rename them"
        raise InputError(f"cluster.image, cluster.mounts or {job.folder} has a blank; {what}")
    if job.site.container == "pyxis":
        flags = f"--container-image={image} --container-mounts={mounts}"
        return {"SRUN_FLAGS": f"{flags} --container-workdir={job.folder}"}
    gpu = "--nv " if job.accelerator == "cuda" else ""
    return {"CONTAINER": f"apptainer exec {gpu}--bind {mounts} --pwd {job.folder} {image}"}
