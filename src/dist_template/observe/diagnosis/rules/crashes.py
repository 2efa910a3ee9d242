"""How the newest attempt ended: out of memory, with an error, or without a word."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from ....cluster.hang import rank_ranges
from ....records import GIB
from ...history.run import History
from ..crash import sentence
from ..engine import rule
from ..finding import Cause, Finding
from ..memory import as_size, training_of
from ..remedies import held, remedies

TOGETHER_S = 60.0  # between the crashes of two ranks of one attempt: they break each other's collectives at once
QUIET_S = 120.0  # without a word from a run that has not ended; steps that take longer are seldom
FULL = 0.9  # of the host's memory: the kernel kills a process when it is full, in the next step perhaps


def newest(history: History) -> list[dict[str, Any]]:
    """The crashes of the newest attempt, by rank; none where another attempt has begun since."""
    if not history.crashes:
        return []
    last = history.crashes[-1]["time"]
    began = history.environment.get("time")
    if began and datetime.strptime(began, "%Y-%m-%dT%H:%M:%S%z").timestamp() > last:
        return []
    of_attempt = [crash for crash in history.crashes if crash["time"] > last - TOGETHER_S]
    return sorted(of_attempt, key=lambda crash: crash["rank"])


@rule
def out_of_memory(history: History) -> Iterator[Finding]:
    """What held the memory of the rank that had the most, and what would free some of it."""
    crashes = [crash for crash in newest(history) if crash["kind"] == "out_of_memory"]
    if not crashes:
        return
    worst = max(crashes, key=lambda crash: crash["memory"].get("used_gib", 0.0))
    step, training = worst["step"] + 1, training_of(history)
    causes: list[Cause] = []
    if training is not None:
        is_first = worst["step"] == worst["first_step"]
        memory = held(training, worst["memory"], worst["phase"], is_first)
        rows = history.key("data.global_batch_size", 0) // max(training.micro_batch_size * training.cut.ranks, 1)
        causes = remedies(memory, max(rows, 1), bool(history.fact("machine.supports_bf16")))
        told = _parts(memory.parts, memory.total, memory.is_measured)
    else:
        told = "The model was not in its place yet: its size is not known."
    yield Finding(
        "out_of_memory",
        "error",
        "certain",
        "out of memory",
        f"{_figures(worst)} {told}",
        causes,
        steps=(step, step),
        ranks=[crash["rank"] for crash in crashes],
        explains=("memory_nearly_full", "crashed"),
    )


def _figures(crash: dict[str, Any]) -> str:
    asked, used, total = (GIB * (crash["memory"].get(f"{key}_gib") or 0.0) for key in ("asked", "used", "total"))
    found = f"In {crash['place']}" + (f", in {crash['module']}" if crash["module"] else "")
    found += f": {as_size(asked)} more were asked for" if asked else ""
    return f"{found}; {as_size(used)} of {as_size(total)} were in use." if total else f"{found}."


def _parts(parts: dict[str, float], total: float, is_measured: bool) -> str:
    told = ", ".join(f"{name} {as_size(size)}" for name, size in parts.items() if size > 0.01 * total)
    return f"What held it: {told}." if is_measured else f"What a step needs, by count: {told}."


@rule
def crashed(history: History) -> Iterator[Finding]:
    """The error as it was told when it happened; each distinct one once."""
    told: dict[str, list[dict[str, Any]]] = {}
    for crash in newest(history):
        if crash["kind"] == "other":
            told.setdefault(f"{crash['error']}: {crash['message']}", []).append(crash)
    for crashes in told.values():
        first, ranks = crashes[0], [crash["rank"] for crash in crashes]
        lines = f" {first['own_lines'][-1]}." if first["own_lines"] else ""
        where = f"The tracebacks are in {history.folder / 'crash'}."
        yield Finding(
            "crashed",
            "error",
            "certain",
            f"training crashed: {first['error']}",
            f"{sentence(first)}.{lines} Rank{'s' * (len(ranks) > 1)} {rank_ranges(ranks)}. {where}",
            steps=(first["step"] + 1, first["step"] + 1),
            ranks=ranks,
        )


@rule
def killed_for_memory(history: History) -> Iterator[Finding]:
    """On a CPU, whose memory is the host's: the kernel kills by SIGKILL, and a killed process writes nothing."""
    share, loss = history.metrics["memory/peak_share"].finite(), history.metrics["train/loss"]
    if not len(share) or not len(loss) or share.last < FULL or newest(history):
        return
    last, end = int(loss.steps[-1]), history.fact("training.max_steps")
    is_quiet = time.time() - float(loss.times[-1]) > QUIET_S
    if history.fact("machine.device") != "cpu" or not end or last >= end or not is_quiet:
        return
    yield Finding(
        "killed_for_memory",
        "warning",
        "possible",
        "the kernel may have killed it for its memory",
        f"Nothing was written after step {last} of {end}, and memory/peak_share was {share.last:.0%}.",
        [Cause("`dmesg` on the host tells; so does the launcher: a rank was killed by SIGKILL.")] + _of_count(history),
        steps=(last, last),
    )


def _of_count(history: History) -> list[Cause]:
    training = training_of(history)
    return remedies(held(training), 1, False)[:1] if training else []
