"""Rules about how the last attempt ended: out of memory, by an exception, by a non-finite loss."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import numpy as np

from ....observe.crash import sentence
from ...history import History
from ...values import GIB
from .. import expected
from ..finding import Cause, Finding, Level
from ..memory import as_size
from ..remedies import memory_use, remedies

SAME_CRASH_S = 60.0  # one rank's crash breaks the collectives of the others at once
LOSS_ROSE = 1.2  # times the lowest loss so far: training went wrong before the loss was non-finite


def _last_crashes(history: History, kind: str) -> list[dict[str, Any]]:
    """Returns the crash records of the last attempt, by rank; [] if a later attempt has started."""
    if not history.crashes:
        return []
    last = history.crashes[-1]["time"]
    started = history.environment.get("time")
    if started and datetime.strptime(started, "%Y-%m-%dT%H:%M:%S%z").timestamp() > last:
        return []
    crashes = [
        crash
        for crash in history.crashes
        if crash["time"] > last - SAME_CRASH_S and crash["kind"] == kind
    ]
    return sorted(crashes, key=lambda crash: crash["rank"])


def out_of_memory(history: History) -> Iterator[Finding]:
    """Reports what used the memory of the rank that had the most in use, and what frees some."""
    crashes = _last_crashes(history, "out_of_memory")
    if not crashes:
        return
    worst = max(crashes, key=lambda crash: crash["memory"].get("used_gib", 0.0))
    memory, step, causes = worst["memory"], worst["step"] + 1, []
    evidence = f"In {worst['place']}"
    if worst["module"]:
        evidence += f", in {worst['module']}"
    if requested := memory.get("asked_gib"):
        evidence += f": {as_size(GIB * requested)} more were requested"
    if total := memory.get("total_gib"):
        used = memory.get("used_gib") or 0.0
        evidence += f"; {as_size(GIB * used)} of {as_size(GIB * total)} were in use"
    used_by = "The size of the model is not known: it was not built yet."
    if history.fact("parameters.total"):
        use = memory_use(
            history, memory, worst["phase"], is_first=worst["step"] == worst["first_step"]
        )
        causes = remedies(use)
        parts = []
        for name, size in sorted(use.parts.items(), key=lambda part: -part[1]):
            if size > use.total / 100:
                parts.append(f"{name} {as_size(size)}")
        used_by = f"Used by: {', '.join(parts)}."
    evidence, ranks = f"{evidence}. {used_by}", [crash["rank"] for crash in crashes]
    explains = ("crashed", "memory_nearly_full")
    yield Finding(
        "out_of_memory",
        "error",
        "certain",
        "out of memory",
        evidence,
        causes,
        (step, step),
        ranks,
        explains,
    )


def crashed(history: History) -> Iterator[Finding]:
    """Reports each distinct exception once, with the ranks that raised it."""
    by_error: dict[str, list[dict[str, Any]]] = {}
    for crash in _last_crashes(history, "other"):
        by_error.setdefault(f"{crash['error']}: {crash['message']}", []).append(crash)
    for crashes in by_error.values():
        first, ranks = crashes[0], [crash["rank"] for crash in crashes]
        tracebacks = f"The tracebacks are in {history.folder / 'crash'}."
        evidence = ". ".join([sentence(first), *first["own_lines"][-1:], tracebacks])
        title, steps = f"training crashed: {first['error']}", (first["step"] + 1, first["step"] + 1)
        yield Finding("crashed", "error", "certain", title, evidence, (), steps, ranks)


def loss_not_finite(history: History) -> Iterator[Finding]:
    """Uses the incidents that the numerics guard recorded, or else the logged loss."""
    loss = history.metrics[expected.training_loss(history, of_several=True)]
    incidents = [each for each in history.incidents if each.get("kind") == "non_finite"]
    steps = [each["step"] for each in incidents] or loss[~np.isfinite(loss.values)].steps.tolist()
    if not steps:
        return
    suspects: set[int] = set()
    origin = None
    for each in incidents:
        suspects.update(each.get("suspects", ()))
        origin = origin or each.get("first_bad")
    evidence = f"{len(steps)} step{'s' * (len(steps) > 1)}, the first one {steps[0]}"
    if origin:
        evidence += f"; first non-finite {origin['what']}: {origin['module']}"
        evidence += f", on rank {', '.join(map(str, origin['ranks']))}" if origin["ranks"] else ""
    is_error = not incidents or len(incidents) > 3 or incidents[-1]["decision"] == "stop"
    level: Level = "error" if is_error else "warning"
    title, ranks = "the loss or the gradient is not finite", sorted(suspects)
    causes = _why_not_finite(history, steps[0], origin, ranks, incidents)
    span, explains = (steps[0], steps[-1]), ("loss_diverges", "loss_spikes", "early_loss_jump")
    explains += ("no_better_than_unigram",)
    yield Finding(
        "loss_not_finite", level, "certain", title, f"{evidence}.", causes, span, ranks, explains
    )


ORIGINS = {  # what callbacks/first_bad.py found, with the name of the module or tensor
    "weight": "The weight {} is not finite: something other than the optimizer wrote it.",
    "data": "The data of the step are not finite, in {}: inspect its rows.",
    "output": "{} is the first module with a non-finite output: check its code and its weights.",
    "buffer": "The buffer {} is not finite: earlier data have damaged this statistic.",
    "gradient": "The forward pass is finite, and the gradient of the output of {} is not: check"
    " what reads it (a square root, a norm or a division at 0).",
}


def _why_not_finite(
    history: History, step: int, origin: dict | None, ranks: list[int], incidents: list[dict]
) -> list[Cause]:
    precision = str(history.key("trainer.precision", "32-true"))
    loss = expected.metric(history, expected.training_loss(history, of_several=True))
    before = loss.values[loss.steps < step]
    rose = len(before) > 1 and before[-1] > LOSS_ROSE * before.min()
    # In the first steps the learning rate has no effect yet: model, data or precision is at fault.
    is_unstable = step > 2 and (expected.rate_is_high(history) or rose)
    causes = []
    if precision.startswith("16"):
        causes.append(Cause(f"{precision} overflows above 65,504.", [expected.bf16(history)]))
    if is_unstable:
        lower = expected.lower_rate(history, step - 1)
        causes.append(Cause("The learning rate is too high.", lower))
    if origin:
        first = Cause(ORIGINS[origin["what"]].format(origin["module"]))
        causes.insert(len(causes) if is_unstable else 0, first)
    if len(incidents) > 1 and len(ranks) == 1:
        hardware = f"Always rank {ranks[0]}, with different samples: its hardware may be defective."
        causes.insert(0, Cause(hardware))
    damaged = "The samples of that step are damaged: inspect their rows (incidents.jsonl)"
    return [*causes, expected.damaged_samples(history, "numerics.on_non_finite", damaged)]
