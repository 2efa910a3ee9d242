"""Environment variables that identify a run and a launch to their processes and restarts."""

import os
from pathlib import Path

from ..errors import InputError

__all__ = ["Variable"]


class Variable:
    """Names of the environment variables."""

    # The name of the run's folder; set by launch/*, or the first process.
    RUN_ID = "DIST_RUN_ID"
    # Identifies the launch, the same on all nodes; set by torchrun.py.
    LAUNCH = "DIST_LAUNCH"
    # Unix time of the job's first start; set by launchers.
    STARTED = "DIST_JOB_STARTED"
    # A folder for the ranks' exit codes; set by wings/launch/ranks.py.
    EXIT_CODES = "DIST_EXIT_CODES"


# What launchers and schedulers set: least and most.
NUMBERS = {
    "WORLD_SIZE": (1, 10_000_000),
    "LOCAL_WORLD_SIZE": (1, 100_000),
    "LOCAL_SIZE": (1, 100_000),
    "RANK": (0, 10_000_000),
    "LOCAL_RANK": (0, 100_000),
    "NODE_RANK": (0, 1_000_000),
    "CROSS_RANK": (0, 1_000_000),
    "MASTER_PORT": (0, 65_535),
    "SLURM_NTASKS": (1, 10_000_000),
    "SLURM_STEP_NUM_TASKS": (1, 10_000_000),
    "SLURM_PROCID": (0, 10_000_000),
    "SLURM_LOCALID": (0, 100_000),
    Variable.STARTED: (0, 1e12),
}
# A rank is below its number of ranks.
RANKS = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_SIZE"))


def check_environment() -> None:
    """Raises InputError if a variable that a launcher sets is no number, or contradicts another."""
    found = {}
    for name, (least, most) in NUMBERS.items():
        given = os.environ.get(name)
        if not given:
            continue
        try:
            found[name] = float(given) if name == Variable.STARTED else int(given)
            is_possible = least <= found[name] <= most
        except ValueError:
            is_possible = False
        if not is_possible:
            raise InputError(
                f"the environment variable {name} is {given!r}; a launcher sets it to a number"
                f" from {least} to {most:.0f}: unset it, or start by torchrun or `launch`"
            )
    for rank, size in RANKS:
        if rank in found and size in found and found[rank] >= found[size]:
            raise InputError(
                f"the environment variable {rank} is {found[rank]}, and {size} is {found[size]}:"
                " unset both, or start by torchrun or `launch`"
            )
    local = found.get("LOCAL_WORLD_SIZE", found.get("LOCAL_SIZE"))
    if local and "WORLD_SIZE" in found and found["WORLD_SIZE"] % local:
        raise InputError(
            f"the environment variable WORLD_SIZE is {found['WORLD_SIZE']}, which is no multiple of"
            f" {local}, the processes of each node (LOCAL_WORLD_SIZE): start as many on each"
        )


def record_exit(code: int) -> None:
    """Writes this rank's exit code for a launcher that loses it."""
    folder = os.environ.get(Variable.EXIT_CODES)
    if folder:
        Path(folder, os.environ.get("RANK", "0")).write_text(str(int(code)), encoding="utf-8")
