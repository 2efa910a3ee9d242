"""What a training loop costs per optimizer step, on one process.

Arms: a hand-written loop of torch; the project as shipped; Hugging Face's Trainer and Lightning's
with their defaults. Models: one vector, whose step takes what the loop takes; Llamas of 0.1M and 5M
parameters.

The arms of a model are processes on one core, which live through a round and take turns of some
tenths of a second, in a new order in each round. A ratio is one of two turns that follow each
other, so that a machine whose speed drifts by a quarter within a minute changes both. Rounds go on
until the median of each figure is known to 2 %, or there were --rounds.

Targets: with the vector, the project adds at most what Hugging Face's Trainer adds to the
hand-written loop, and at most 0.4 of what Lightning's defaults add; 0.1M runs at 0.88 of the
hand-written loop's speed at least, and faster than Hugging Face's Trainer; 5M at 0.98.
"""

import random
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from .arms import Comparison, InTurns, interval
from .loops import hand, lightning, project, trainer
from .loops.task import LARGE, SMALL, Task, prepare
from .ranks import on_ranks, turns
from .record import Figure, Options, Result

NAME = "step"
LOOPS = {"hand": hand, "project": project, "Trainer": trainer, "Lightning": lightning}
KNOWN = 0.02  # half of the interval of a median, as a share of it, with which a figure is known


@dataclass(frozen=True)
class Model:
    """What a round of one model is.

    Attributes:
        architecture: None: a vector.
        warm: Optimizer steps before the first turn.
        turn: Optimizer steps of a turn.
        turns: Of each arm in a round."""

    architecture: dict[str, Any] | None
    warm: int
    turn: int
    turns: int
    batch_size: int
    seq_len: int


MODELS = {
    "null": Model(None, 100, 300, 20, 8, 32),  # some seconds: garbage that is kept for one counts
    "0.1M": Model(SMALL, 60, 20, 20, 8, 64),
    "5M": Model(LARGE, 10, 10, 15, 4, 64),
}


def run(options: Options) -> Result:
    result = Result(NAME)
    with tempfile.TemporaryDirectory() as folder:
        for name, model in MODELS.items():
            if options.quick:
                model = replace(model, warm=1, turn=2, turns=2, batch_size=2, seq_len=16)
            steps = model.warm + model.turns * model.turn
            task = Task(
                Path(folder),
                model.architecture,
                steps,
                model.warm,
                model.batch_size,
                model.seq_len,
                log_every=2 if options.quick else 10,
            )
            prepare(task)
            result.comparisons.append(_compared(name, task, model.turn, options))
    result.figures = _figures(*result.comparisons)
    return result


def _compared(name: str, task: Task, turn: int, options: Options) -> Comparison:
    """Rounds of all arms, until each figure of the model is known or there were enough."""
    comparison = Comparison(f"{name} model", "optimizer step", "hand")
    comparison.samples = {arm: [] for arm in LOOPS}
    for number in range(1, options.rounds + 1):
        for arm, sample in taking_turns(LOOPS, task, turn).items():
            comparison.samples[arm] += sample.turns
        apart = max(_apart(comparison.cpu_ratios(arm)) for arm in LOOPS)
        print(f"  {comparison.title}: round {number}, known to {apart:.1%}", flush=True)
        if apart <= KNOWN:
            break
    return comparison


def _apart(ratios: list[float]) -> float:
    low, high = interval(ratios)
    return (high - low) / 2 / statistics.median(ratios)


def taking_turns(arms: Mapping[str, Any], task: Task, turn: int) -> dict[str, InTurns]:
    """A round: what each arm's turns took, in a new order."""
    order = random.sample([*arms], len(arms))
    each = zip(order, turns(len(order), 1, turn), strict=True)
    jobs = [partial(arms[name].train, replace(task, turns=one)) for name, one in each]
    return {name: found[0] for name, found in zip(order, on_ranks(1, jobs, 900.0), strict=True)}


def _figures(null: Comparison, small: Comparison, large: Comparison) -> list[Figure]:
    return [
        Figure(
            "null: CPU time added to hand, project over Trainer", _added(null, "Trainer"), at_most=1
        ),
        Figure("null: the same, project over Lightning", _added(null, "Lightning"), at_most=0.4),
        Figure(
            "0.1M: speed of project over hand, by CPU time",
            small.cpu_ratios("hand", "project"),
            at_least=0.88,
        ),
        Figure(
            "0.1M: speed of project over Trainer",
            small.cpu_ratios("Trainer", "project"),
            at_least=1,
        ),
        Figure(
            "5M: speed of project over hand", large.cpu_ratios("hand", "project"), at_least=0.98
        ),
    ]


def _added(null: Comparison, arm: str) -> list[float]:
    """Returns, per round, what the project adds to the hand-written loop over what `arm` adds."""
    pairs = zip(null.cpu_added("project"), null.cpu_added(arm), strict=True)
    return [project / other for project, other in pairs]
