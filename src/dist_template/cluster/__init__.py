"""Keeps the processes of one run together: start, comparison, watchdog, signals, exit.

launch.py               environment variables that identify a run and a launch
signals.py, exit.py     SIGTERM and SIGUSR1 from the first moment on; an exit that cannot abort
torchrun.py             torchrun with exit codes
rendezvous.py           all ranks connect before the first collective; fingerprint.py compares them
watchdog.py, hang.py    detect a hang and name the stalled rank
run_lock.py             one launch at a time writes into a run's folder
site.py                 the machines of a run, for launch and plan
environment.py          packages, git, hardware; redaction.py keeps secrets out of it
messages.py             hides warnings on ranks other than 0"""
