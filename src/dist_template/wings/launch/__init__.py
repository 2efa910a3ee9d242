"""Renders and submits a run to any launcher or scheduler, from one description of its machines.

command.py    the verb; job.py: what is started, and the checks before it
nodes.py      starts a script on each node, by ssh or here; signals, logs, exit codes
targets/      a file for each launcher or scheduler
"""
