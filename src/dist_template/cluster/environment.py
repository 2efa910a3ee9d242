"""Describes what a process runs on: command, packages, git commit, hardware, variables."""

import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from ..plugins import normalized
from ..records import text_of
from .redaction import recorded_variables, redacted_command
from .signals import job_started

__all__ = ["comparable"]

DRIVER = Path("/proc/driver/nvidia/version")


def environment() -> dict[str, object]:
    """Returns everything for a run's environment.json, with host and time."""
    job_ends = os.environ.get("SLURM_JOB_END_TIME")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": redacted_command([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "host": platform.node(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "git_changes": git("status", "--short"),
        "job_started": job_started(),  # Unix time, as job_ends
        "job_ends": float(job_ends) if job_ends else None,
        **comparable(),
    }


def comparable() -> dict[str, object]:
    """Returns what must be equal on all machines of a training."""
    import torch
    import torch.cuda.nccl

    nccl = None
    if torch.version.cuda:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    changes = git("diff", "HEAD")
    return {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "driver": driver(),
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())],
        "git_commit": git("rev-parse", "HEAD"),
        "git_diff": digest(changes) if changes else None,
        "variables": recorded_variables(os.environ),
        "packages": packages(),
    }


def packages() -> dict[str, str]:
    """Returns the versions of the installed packages. They are read from the names of their
    folders, `<name>-<version>.dist-info` by the packaging specification, in 2 ms;
    importlib.metadata takes 76 ms."""
    found: dict[str, str] = {}
    for folder in sys.path:
        for path in sorted(Path(folder).glob("*.dist-info")):  # none in a zip file
            package, _, version = path.name.removesuffix(".dist-info").partition("-")
            found.setdefault(normalized(package), version)
    return dict(sorted(found.items()))


def driver() -> str | None:
    """Returns the version of the NVIDIA driver, or None without one."""
    text = text_of(DRIVER)
    if not text:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found.group() if found else "unknown"


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def git(*arguments: str) -> str | None:
    """Returns the output of a git command, or None without git or a repository."""
    try:
        command = ["git", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if result.returncode != 0:
        return None
    return result.stdout.strip()


def machine() -> str:
    """Identifies where a process id is valid: this boot of this machine, and the container."""
    known = [platform.node(), text_of(Path("/proc/sys/kernel/random/boot_id")).strip()]
    with suppress(OSError):  # Linux alone has it, as the boot's id
        known.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(filter(None, known))
