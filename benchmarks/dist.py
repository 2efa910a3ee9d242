"""Two processes of this machine: the project against the same strategy written by hand, and Hugging Face's Trainer.

DDP, FSDP2 and ZeRO-2, a Llama of 5M parameters, over gloo. Each arm of each round has fresh processes. CPU time is that
of all ranks together, wall time that of the slowest. Hugging Face's Trainer is compared under DDP alone.

Targets: the project runs at 0.97 of the hand-written loop's speed at least, under each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from .arms import Arm, Comparison, Sample, compare
from .loops.task import LARGE, SMALL, Task, check_alike, prepare
from .ranks import on_ranks
from .record import Figure, Options, Result

NAME = "dist"
RANKS = 2
STRATEGIES = {"ddp": ["hand", "project", "Trainer"], "fsdp2": ["hand", "project"], "zero2": ["hand", "project"]}


def run(options: Options) -> Result:
    result = Result(NAME)
    with tempfile.TemporaryDirectory() as folder:
        task = Task(Path(folder), LARGE, steps=94, warm=54, batch_size=4, seq_len=64)
        if options.quick:
            task = replace(task, architecture=SMALL, steps=4, warm=1, log_every=2)
        prepare(task)
        for strategy, names in STRATEGIES.items():
            arms: dict[str, Arm] = {name: partial(train, name, replace(task, strategy=strategy)) for name in names}
            comparison = Comparison(f"5M model, {strategy}, {RANKS} processes", "optimizer step", "hand")
            compare(comparison, arms, options.rounds, warm=False)
            result.comparisons.append(comparison)
            cpu, wall = comparison.cpu_ratios("hand", "project"), comparison.speeds("project")
            result.figures += [
                Figure(f"{strategy}: speed of project over hand, by wall time", wall, at_least=0.97),
                Figure(f"{strategy}: the same by CPU time of both ranks", cpu, at_least=0.97),
            ]
        check_alike(task.folder, ["hand_ddp", "hand_fsdp2", "hand_zero2"])
    return result


def train(arm: str, task: Task) -> Sample:
    ranks = on_ranks(RANKS, train_rank, arm, task)
    return Sample(sum(each.cpu_s for each in ranks), max(each.wall_s for each in ranks))


def train_rank(arm: str, task: Task) -> Sample:
    from .loops import hand, project, trainer

    loops: dict[str, Callable[[Task], Sample]] = {
        "hand": hand.train,
        "project": project.train,
        "Trainer": trainer.train,
    }
    return loops[arm](task)
