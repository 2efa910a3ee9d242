"""Rule of diagnosis: checkpoints are not in the store."""

from collections.abc import Iterator

from ..diagnose.finding import Cause, Change, Finding
from ..history import History


def store_behind(history: History) -> Iterator[Finding]:
    """Reports a store that refused the newest checkpoints, or for which checkpoints had to wait."""
    failed, waited = history.metrics["health/store_failed"], history.metrics["health/store_wait_s"]
    if len(failed) and failed.last:
        number = int(failed.last)
        evidence = f"The last {number} uploads to {history.key('run.store')} failed; the log has the reasons."
        cause = Cause(
            "The store refuses or does not answer: its credentials may have expired, or its quota is used up."
        )
        steps = int(failed.steps[failed.values > 0][0]), int(failed.steps[-1])
        yield Finding("store_refuses", "error", "certain", "checkpoints are not in the store", evidence, [cause], steps)
    if len(waited) and waited.last > 1:
        every = history.key("last_checkpoint.every_n_steps") or 100
        evidence = f"Checkpoints waited {waited.last:.0f} s for the uploads of those before."
        cause = Cause("The store is slower than checkpoints are due.")
        cause = Cause(cause.sentence, [Change("last_checkpoint.every_n_steps", every, 2 * every)])
        title = "checkpoints wait for the store"
        yield Finding("store_slow", "warning", "certain", title, evidence, [cause])
