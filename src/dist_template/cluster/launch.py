"""Environment variables that identify a run and a launch to their processes and restarts."""

__all__ = ["Variable"]


class Variable:
    """Names of the environment variables."""

    RUN_ID = "DIST_RUN_ID"  # the name of the run's folder; set by launch/*, or the first process
    LAUNCH = "DIST_LAUNCH"  # identifies the launch, the same on all nodes; set by torchrun.py
    STARTED = "DIST_JOB_STARTED"  # Unix time of the job's first start; set by launchers
