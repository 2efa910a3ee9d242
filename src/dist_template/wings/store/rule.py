"""Rule of diagnosis: the store refuses checkpoints."""

from collections.abc import Iterator

from ..diagnose.finding import Cause, Finding
from ..history import History


def store_refuses(history: History) -> Iterator[Finding]:
    failed = history.metrics["health/store_failed"]
    if len(failed) and failed.last:
        evidence = f"The last {failed.last:.0f} uploads to {history.key('run.store')} failed; the log has the reasons."
        cause = Cause("The store refuses or does not answer: credentials expired, a quota is used up, no network.")
        yield Finding("store_refuses", "error", "certain", "checkpoints are not in the store", evidence, [cause])
