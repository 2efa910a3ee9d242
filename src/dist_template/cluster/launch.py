"""Environment variables that identify a run and a launch to their processes and restarts."""

import os
from pathlib import Path

__all__ = ["Variable"]


class Variable:
    """Names of the environment variables."""

    RUN_ID = "DIST_RUN_ID"  # the name of the run's folder; set by launch/*, or the first process
    LAUNCH = "DIST_LAUNCH"  # identifies the launch, the same on all nodes; set by torchrun.py
    STARTED = "DIST_JOB_STARTED"  # Unix time of the job's first start; set by launchers
    # a folder for the ranks' exit codes; set by wings/launch/ranks.py
    EXIT_CODES = "DIST_EXIT_CODES"


def record_exit(code: int) -> None:
    """Writes this rank's exit code for a launcher that loses it."""
    if folder := os.environ.get(Variable.EXIT_CODES):
        Path(folder, os.environ.get("RANK", "0")).write_text(str(int(code)), encoding="utf-8")
