"""Hooks: functions of other packages that the core calls during a run.

An entry point of the group `dist_template.hooks` names a module with some of

    def on_crash(error: Exception) -> str | None
        Called when a verb ends with an unexpected error, on the rank that reports it. The text is
        printed after the error. `observe.crash.record_of(error)` is the path of the rank's record.
    def at_run_end(run: Path, error: BaseException | None) -> None
        Called on rank 0 when `fit` has finished, with None, or stops because of `error`; `run` is
        the run's folder. All metrics are written. The small trainings of `rehearse` call it too.
    def at_start(settings: Namespace, verb: str | None) -> None
        Called on every rank before the run's folder and the checkpoint are chosen; it may change
        `settings`, the configuration. An InputError refuses the start. None: nothing will run.
    def fetch(address: str, files: list[str], folder: Path) -> str | None
        Fetches files of a checkpoint from `address` into its `folder`, which lacks them. Returns
        why it could not, or None; a StoreIsDown if the same command may succeed later.

They are called in the order of the names of the entry points; of `at_start` and `fetch`, the first.
If one of the others raises, one line reports it: the result and the exit code do not change."""

import sys

from .errors import InputError, first_line
from .plugins import HOOKS, registered

__all__ = ["StoreIsDown"]


class StoreIsDown(str):
    """Why files could not be fetched, if the store does not answer: the job is to be relaunched."""


def call(name: str, *arguments: object) -> list[str]:
    """Calls the function `name` of every hook that has it, and returns the texts among the
    results."""
    results: list[str] = []
    try:
        points = registered(HOOKS)
    except InputError as error:
        print(f"hooks: {error}", file=sys.stderr, flush=True)
        return results
    for point in points.values():
        try:
            function = getattr(point.load(), name, None)
            if function and isinstance(result := function(*arguments), str):
                results.append(result)
        except (Exception, SystemExit) as error:
            kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
            text = f"{name} of {point.name} failed: {kind}{first_line(error)}"
            print(text, file=sys.stderr, flush=True)
    return results
