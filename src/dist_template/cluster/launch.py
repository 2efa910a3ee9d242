"""Environment variables by which the processes of one job, and its restarts, know each other."""

RUN_ID = "DIST_RUN_ID"  # names the run's folder; set by launch/*, or by the first process for the others
LAUNCH = "DIST_LAUNCH"  # which launch this is, the same on all nodes; set by cluster/torchrun.py
