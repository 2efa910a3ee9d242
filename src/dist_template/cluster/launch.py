"""Environment variables that identify a run and a launch to their processes and restarts."""

RUN_ID = "DIST_RUN_ID"  # the name of the run's folder; set by launch/*, or by the first process
LAUNCH = "DIST_LAUNCH"  # identifies the launch, the same on all nodes; set by torchrun.py
