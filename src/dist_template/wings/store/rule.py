"""Rule of diagnosis: the store refuses checkpoints, or is slow."""

from collections.abc import Iterator

from ..diagnose.finding import Cause, Change, Finding
from ..history import History


def store_behind(history: History) -> Iterator[Finding]:
    """Reports a store that refused the newest uploads, or for which checkpoints had to wait."""
    failed, waited = history.metrics["health/store_failed"], history.metrics["health/store_waited_s"]
    if len(failed) and failed.last:
        evidence = f"The last {failed.last:.0f} uploads to {history.key('run.store')} failed; the log has the reasons."
        cause = Cause("The store refuses or does not answer: credentials expired, a quota is used up, no network.")
        yield Finding("store_refuses", "error", "certain", "checkpoints are not in the store", evidence, [cause])
    elif len(waited) and waited.last > 1:
        every = history.key("last_checkpoint.every_n_steps") or 100
        cause = Cause("Save less often.", [Change("last_checkpoint.every_n_steps", every, 2 * every)])
        evidence = f"Checkpoints waited {waited.last:.0f} s in all for uploads of the checkpoints before."
        yield Finding("store_slow", "warning", "certain", "checkpoints wait for the store", evidence, [cause])
