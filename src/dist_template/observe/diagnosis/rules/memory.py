"""How full the devices are. What held the memory of one that overflowed is diagnosis/memory.py's."""

from __future__ import annotations

from collections.abc import Iterator

from ...history.run import History
from .. import expected, robust
from ..engine import rule
from ..finding import Cause, Change, Finding

FULL = 0.95  # of the device: fragmentation and one longer batch need the rest
GROWS = 0.1  # of what was allocated, since the start
STEADY = 0.9  # of pairs of medians in which the later is higher
MIN_POINTS = 20


@rule
def memory_nearly_full(history: History) -> Iterator[Finding]:
    share = history.metrics["memory/peak_share"].finite()
    if not len(share) or share.last <= FULL:
        return
    reserved, allocated = (
        history.metrics["memory/reserved_gib"].finite(),
        history.metrics["memory/allocated_gib"].finite(),
    )
    told = f"; {reserved.last:.1f} GiB reserved" if len(reserved) else ""
    told += f", {allocated.last:.1f} allocated" if len(allocated) else ""
    yield Finding(
        "memory_nearly_full", "warning", "certain", "memory is nearly full",
        f"memory/peak_share is {share.last:.1%} at step {share.steps[-1]}{told}.",
        [*_smaller_micro_batch(history), *_checkpointing(history)],
        steps=robust.span(share),
    )  # fmt: skip


def _smaller_micro_batch(history: History) -> Iterator[Cause]:
    size = history.key("data.micro_batch_size")
    if size and size > 1:
        to = max(each for each in range(1, size) if size % each == 0)
        yield Cause(
            "The micro-batch is too large; with a smaller one the global batch stays as it is.",
            [Change("data.micro_batch_size", size, to)],
        )


def _checkpointing(history: History) -> Iterator[Cause]:
    if history.key("model.blocks.checkpointing", "none") == "none":
        yield Cause(
            "Every activation is kept for backward.", [Change("model.blocks.checkpointing", "none", "selective")]
        )


@rule
def memory_grows(history: History) -> Iterator[Finding]:
    """Something keeps tensors from step to step."""
    used = robust.later(history.metrics["memory/allocated_gib"].finite(), expected.settled_after(history))
    if len(used) < MIN_POINTS:
        return
    first, last = robust.head(used), robust.tail(used)
    if last < (1 + GROWS) * first or robust.rising_share(used) < STEADY:
        return
    rate = robust.slope(used)
    share = history.metrics["memory/peak_share"].finite()
    total = last / share.last if len(share) and share.last > 0 else None
    full = f"; full at step {int(used.steps[-1] + (total - last) / rate):,}" if total and rate > 0 else ""
    yield Finding(
        "memory_grows", "warning", "likely", "memory grows from step to step",
        f"memory/allocated_gib went from {first:.2f} to {last:.2f} between steps {used.steps[0]} and {used.steps[-1]}, "
        f"{1024 * rate:.3g} MiB a step{full}.",
        [
            Cause("Something keeps a tensor of every step: a list of losses, or a loss added up without .detach()."),
            Cause("Another process on the machine, or workers that read data, take more and more."),
        ],
        steps=robust.span(used),
    )  # fmt: skip
