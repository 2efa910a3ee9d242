"""Diagnosis and report of a run, without torch.

engine.py, rules/                 what is wrong with a run, as findings
expected.py, robust.py            what a healthy run does; statistics
memory.py, remedies.py            what uses a device's memory, and what frees some
command.py                        the verb `diagnose`
callback.py                       diagnosis during training
hooks.py                          after a crash, and at the end of a run
report/                           the page, and the verbs `report` and `compare`

Names for rules of other packages are imported when they are first used.
"""

from __future__ import annotations

from ...lazy import attribute_of

PLACES = {  # public name -> the module of this library that defines it
    "Finding": "wings.diagnose.finding",
    "Cause": "wings.diagnose.finding",
    "Change": "wings.diagnose.finding",
    "History": "observe.history.run",
    "read_run": "observe.history.run",
}

__all__ = [*PLACES]  # noqa: PLE0604  (lazy)
__getattr__ = attribute_of(__name__, PLACES)
