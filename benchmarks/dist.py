"""Two processes of this machine: the project against the same strategy, hand-written, and Hugging
Face's Trainer.

DDP and FSDP2, a Llama of 5M parameters, over gloo. Each round has fresh processes of all arms of a
strategy, which warm up together and then take turns of ten steps. CPU time is of all ranks, wall
time of the slowest.

Targets: the project runs at 0.97 of the hand-written loop's speed at least, under each.
"""

import random
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from .arms import Comparison, Sample
from .loops import hand, project, trainer
from .loops.task import LARGE, SMALL, Task, prepare
from .ranks import on_ranks, turns
from .record import Figure, Options, Result

NAME = "dist"
RANKS, TURN = 2, 10  # processes; optimizer steps
LOOPS = {"hand": hand, "project": project, "Trainer": trainer}
STRATEGIES = {"ddp": ["hand", "project", "Trainer"], "fsdp2": ["hand", "project"]}


def run(options: Options) -> Result:
    result = Result(NAME)
    with tempfile.TemporaryDirectory() as folder:
        task = Task(Path(folder), LARGE, steps=54 + 8 * TURN, warm=54, batch_size=4, seq_len=64)
        if options.quick:
            task = replace(task, architecture=SMALL, steps=1 + 2 * TURN, warm=1)
        prepare(task)
        for strategy, names in STRATEGIES.items():
            comparison = Comparison(
                f"5M model, {strategy}, {RANKS} processes", "optimizer step", "hand"
            )
            comparison.samples = {name: [] for name in names}
            for number in range(1, options.rounds + 1):
                for name, sample in taking_turns(names, replace(task, strategy=strategy)).items():
                    comparison.samples[name].append(sample)
                print(f"  {comparison.title}: round {number} of {options.rounds}", flush=True)
            result.comparisons.append(comparison)
            cpu, wall = (
                comparison.cpu_ratios("hand", "project"),
                comparison.wall_ratios("hand", "project"),
            )
            result.figures += [
                Figure(
                    f"{strategy}: speed of project over hand, by wall time", wall, at_least=0.97
                ),
                Figure(f"{strategy}: the same by CPU time of both ranks", cpu, at_least=0.97),
            ]
    return result


def taking_turns(names: list[str], task: Task) -> dict[str, Sample]:
    """A round: what a step took, of each arm, in a new order."""
    order = random.sample(names, len(names))
    each = zip(order, turns(len(order), RANKS, TURN), strict=True)
    answers = on_ranks(
        RANKS, [partial(LOOPS[name].train, replace(task, turns=turn)) for name, turn in each]
    )
    return {
        name: Sample(sum(rank.cpu_s for rank in ranks), max(rank.wall_s for rank in ranks))
        for name, ranks in zip(order, answers, strict=True)
    }
