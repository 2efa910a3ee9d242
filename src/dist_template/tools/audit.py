"""`audit`: prove from a run's ledger that each sample was trained on once an epoch, through restarts and resizes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import Exit, InputError
from ..observe.history.run import read_incidents
from ..project import Project, program
from ..text.order import permutation, stream_position


@dataclass
class Attempt:
    """One start of a training: its header, and what each rank consumed in each step that reached its file."""

    header: dict[str, Any]
    steps: dict[int, dict[int, list[list[int]]]] = field(default_factory=dict)  # step -> rank -> rows per micro-batch


def main(argv: list[str], project: Project) -> None:
    """Print what was found about `--run`.

    Raises:
        InputError: there is no ledger.
        SystemExit: with 1, when a sample was used twice, never, or out of order.
    """
    parser = argparse.ArgumentParser(prog=program("audit"), description=__doc__, allow_abbrev=False)
    parser.add_argument("--run", required=True, type=Path, help="the run's folder, runs/<name>/<id>")
    run = parser.parse_args(argv[1:]).run
    attempts = read_attempts(run / "ledger")
    if not attempts:
        raise InputError(f"--run {run}: there is no ledger in it; train with --sample_ledger.enabled true")
    told, wrong = audit(attempts)
    last = max(step for attempt in attempts for step in [attempt.header["step"], *attempt.steps])
    skipped = sorted({i["step"] for i in read_incidents(run) if i["decision"] == "skip" and i["step"] <= last})
    if skipped:
        told.append(f"left out by the numerics guard, and counted as used: steps {', '.join(map(str, skipped))}")
    print("\n".join(told))
    if wrong:
        print("\n".join(f"WRONG: {sentence}" for sentence in wrong))
        sys.exit(Exit.FAILED)
    print("each sample was used exactly once an epoch, in the order of the seed")


def read_attempts(folder: Path) -> list[Attempt]:
    """In the order in which they began."""
    attempts: dict[float, Attempt] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        rank, attempt = int(path.stem.removeprefix("rank")), None
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                event = json.loads(line)
            except ValueError:  # half a line: its process was killed, and the step is done again
                continue
            if "attempt" in event:
                attempt = attempts.setdefault(event["attempt"], Attempt(event))
            elif attempt is not None:
                attempt.steps.setdefault(event["step"], {})[rank] = event["rows"]
    return [attempts[began] for began in sorted(attempts)]


def audit(attempts: list[Attempt]) -> tuple[list[str], list[str]]:
    """What was used, and what is wrong with it: the first of each kind."""
    kept: dict[int, Attempt] = {}  # step -> the attempt whose weights went on
    for attempt in attempts:
        kept = {step: by for step, by in kept.items() if step <= attempt.header["step"]}
        kept |= dict.fromkeys(sorted(attempt.steps), attempt)
    wrong: dict[str, str] = {}
    first, last = attempts[0].header, attempts[-1].header
    for attempt in attempts:
        if any(attempt.header[key] != first[key] for key in ("data", "num_rows", "seed")):
            wrong.setdefault("data", f"the attempt from step {attempt.header['step']} has other data or another seed")
    epochs: dict[int, np.ndarray] = {}  # epoch -> (num_rows,) the step that used each row, -1: none
    begin, position, previous = None, 0, first["step"]
    for step, rows, positions in _steps(kept, wrong):
        if step != previous + 1:
            wrong.setdefault("gap", f"steps {previous + 1} to {step - 1} are in no rank's ledger")
        previous = step
        if begin is not None and positions[0] < position:
            wrong.setdefault("again", f"step {step} begins at sample {positions[0]} of the stream, {position} was next")
        begin, position = positions[0] if begin is None else begin, positions[-1] + 1
        _check(step, rows, positions, first, epochs, wrong)
    jumps = [(start, end) for start, end in last["jumps"] if begin is not None and start < position]
    num_rows, begin = first["num_rows"], begin or 0
    complete = [e for e in sorted(epochs) if e * num_rows >= begin and (e + 1) * num_rows <= position]
    for epoch in complete:
        unused = np.flatnonzero(epochs[epoch] < 0)
        places = np.flatnonzero(np.isin(permutation(num_rows, first["seed"], epoch), unused)) + epoch * num_rows
        never = [p for p in places if not any(start <= p < end for start, end in jumps)]
        if never:
            row = permutation(num_rows, first["seed"], epoch)[never[0] % num_rows]
            wrong.setdefault("never", f"row {row} was never used in epoch {epoch}, nor {len(never) - 1} others")
    used = sum(int((steps >= 0).sum()) for steps in epochs.values())
    told = [
        f"{len(kept)} steps in {len(attempts)} attempts, ranks {' -> '.join(str(a.header['ranks']) for a in attempts)}",
        f"{used} samples of {num_rows} rows an epoch; complete epochs: {', '.join(map(str, complete)) or 'none yet'}",
    ]
    told += [f"jumped after a roll back: samples {start} to {end - 1} of the stream" for start, end in jumps]
    return told, list(wrong.values())


def _steps(kept: dict[int, Attempt], wrong: dict[str, str]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each step's rows in the stream's order, and where in the stream these places are."""
    for step in sorted(kept):
        header, ranks = kept[step].header, kept[step].steps[step]
        size = header["global_batch_size"]
        if missing := set(range(header["ranks"])) - set(ranks):
            wrong.setdefault("rank", f"step {step} is not in the ledger of rank {min(missing)}")
            continue
        micro_batches = zip(*(ranks[rank] for rank in range(header["ranks"])), strict=False)
        rows = np.array([row for micro_batch in micro_batches for part in micro_batch for row in part], dtype=np.int64)
        if len(rows) != size:
            wrong.setdefault("size", f"step {step} used {len(rows)} samples, not {size}")
            continue
        consumed = header["consumed"] + (step - header["step"] - 1) * size
        yield step, rows, np.array([stream_position(consumed + i, header["jumps"]) for i in range(size)])


def _check(
    step: int,
    rows: np.ndarray,
    positions: np.ndarray,
    header: dict[str, Any],
    epochs: dict[int, np.ndarray],
    wrong: dict[str, str],
) -> None:
    num_rows = header["num_rows"]
    for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
        epoch, place = divmod(position, num_rows)
        used = epochs.setdefault(epoch, np.full(num_rows, -1, dtype=np.int64))
        expected = permutation(num_rows, header["seed"], epoch)[place]
        if not 0 <= row < num_rows:
            wrong.setdefault("unknown", f"step {step} used row {row}, and there are {num_rows}")
        elif used[row] >= 0:
            wrong.setdefault("twice", f"row {row} was used twice in epoch {epoch}: in steps {used[row]} and {step}")
        else:
            used[row] = step
            if row != expected:
                wrong.setdefault("order", f"step {step} used row {row} out of order: row {expected} was next")
