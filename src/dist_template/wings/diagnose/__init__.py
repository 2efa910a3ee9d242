"""Diagnosis and report of a run, without torch.

engine.py, rules/                 what is wrong with a run, as findings
expected.py, robust.py            what a healthy run does; statistics
memory.py, remedies.py            what uses a device's memory, and what frees some
command.py                        the verb `diagnose`
callback.py                       diagnosis during training
hooks.py                          after a crash, and at the end of a run
report/                           the page, and the verbs `report` and `compare`

The names below are for rules of other packages."""

from ..history import History, read_run
from .finding import Cause, Change, Finding

__all__ = ["Cause", "Change", "Finding", "History", "read_run"]
