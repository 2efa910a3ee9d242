"""Modules and data as people write them, after Lightning's documentation and public reports.

A network of 57 weights learns a function of four numbers; a row's number is in its batch, so that
a trace shows who trained on what. Nothing here knows this library."""

from ..arms import Habit
from . import flags, loaders, reported, schedules, state

SUBJECTS = {
    "flags": flags,
    "loaders": loaders,
    "schedules": schedules,
    "state": state,
    "reported": reported,
}
HABITS: dict[str, Habit] = {
    name: habit for subject in SUBJECTS.values() for name, habit in subject.HABITS.items()
}


def __getattr__(name: str) -> object:
    """Returns a class, or a function, of one of the subjects."""
    for subject in SUBJECTS.values():
        if hasattr(subject, name):
            return getattr(subject, name)
    raise AttributeError(name)
