"""Pipelines: the time that stages wait, against each schedule's formula; the library against a hand-written loop.

Waiting: blocks that sleep (30 ms forward, 30 ms for the gradient of their input, 30 ms for their weight's) on 2
and 4 processes under `MeshStrategy`, so that the machine's cores do not matter. The step's time over the time of a
rank's own work, minus one, is the bubble; `parallel/pipeline/stages.py` has the formula.

By hand: torch's 1F1B over two halves of a Llama of 5M parameters, 4 micro-batches of 4 rows, against `fit` with every
callback, in turns of ten steps after 54 (in step 50 the library collects garbage, once in a run).

Targets: the step's time is within 10 % of the formula's; the library runs at 0.97 of the hand-written loop's speed.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dist_template import TrainingModule
from dist_template.parallel.mesh import MeshStrategy
from dist_template.parallel.pipeline.stages import stage_facts, stages_per_rank

from .arms import Comparison, Sample
from .loops.hand_pp import MICRO_BATCHES
from .loops.task import LARGE, SMALL, Task, prepare
from .ranks import on_ranks, side_by_side
from .record import Figure, Options, Result
from .turns import turns

NAME = "pipeline"
SLEEP_S, TURN = 30e-3, 10
WAITING = [  # ranks, schedule, micro-batches
    (2, "1F1B", 4), (2, "1F1B", 16), (2, "Interleaved1F1B", 4), (4, "1F1B", 8), (4, "Interleaved1F1B", 8),
]  # fmt: skip


def run(options: Options) -> Result:
    result = Result(NAME)
    for ranks, schedule, micro_batches in WAITING[:1] if options.quick else WAITING:
        per_rank = stages_per_rank(schedule, 2)
        predicted = 1 + stage_facts(schedule, ranks, per_rank, [], [])["bubble"] / micro_batches
        measured = [step_over_work(ranks, schedule, micro_batches) for _ in range(min(options.rounds, 3))]
        what = f"{schedule}, {ranks} processes, {micro_batches} micro-batches, bubble {predicted - 1:.3f}"
        ratios = [each / predicted for each in measured]
        result.figures.append(Figure(f"{what}: time of a step over the formula's", ratios, at_most=1.1))
        print(f"  {result.figures[-1].what}: {result.figures[-1].median:.3f}", flush=True)
    result.comparisons.append(by_hand(options))
    speeds = result.comparisons[0].speeds("project")
    result.figures.append(Figure("speed of the library over a loop by hand", speeds, at_least=0.97))
    return result


# ---- the time in which stages wait -----------------------------------------------------------------------------------


def step_over_work(ranks: int, schedule: str, micro_batches: int) -> float:
    times = on_ranks(ranks, partial(sleepy_steps, schedule, micro_batches))
    per_block = stages_per_rank(schedule, 2)  # every stage has one block
    return max(times) / (micro_batches * per_block * 3 * SLEEP_S)


def sleepy_steps(schedule: str, micro_batches: int) -> float:
    """Returns the seconds of the quickest step: a machine with other work only makes steps longer."""
    import os

    ranks, timer = int(os.environ["WORLD_SIZE"]), Timer()
    strategy = MeshStrategy(pp_size=ranks, fsdp_size=1, pp_schedule=schedule, pp_layers="even")  # ty: ignore[invalid-argument-type]
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, accumulate_grad_batches=micro_batches, max_steps=6,
        callbacks=[timer], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    module = SleepyModule(ranks * stages_per_rank(schedule, 2))
    rows = TensorDataset(torch.zeros(6 * micro_batches, 1, 8))
    trainer.fit(module, DataLoader(rows))
    return min(timer.seconds[2:])


class Timer(Callback):
    """Keeps the seconds of each step's schedule, from its start to the optimizer's."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == trainer.accumulate_grad_batches - 1:
            torch.distributed.barrier()
            self.started = time.perf_counter()

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)


class SleepyModule(TrainingModule):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.num_blocks = blocks

    @property
    def data(self) -> Any:
        return None

    def build_model(self, data: Any) -> nn.Module:
        return Sequence(self.num_blocks)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sequence(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Sleepy() for _ in range(blocks)])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Sleepy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, hidden: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return Asleep.apply(hidden) + Asleep.apply(self.weight)


class Asleep(torch.autograd.Function):
    """The identity, whose gradient takes SLEEP_S."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(SLEEP_S)
        return gradients[0]


# ---- the library against a hand-written loop -------------------------------------------------------------------------


def by_hand(options: Options) -> Comparison:
    names = ["hand", "project"]
    comparison = Comparison("5M model, 1F1B, 2 processes", "optimizer step", "hand", {name: [] for name in names})
    with tempfile.TemporaryDirectory() as folder:
        rows = f"--data.global_batch_size={4 * MICRO_BATCHES}"
        flags = (rows, "--trainer.strategy.init_args.dp_replicate_size=1")
        task = Task(Path(folder), LARGE, steps=54 + 4 * TURN, warm=54, batch_size=4, seq_len=64, strategy="pp")
        task = replace(task, flags=flags)
        if options.quick:
            task = replace(task, architecture=SMALL, steps=1 + 2 * TURN, warm=1)
        prepare(task)
        for number in range(1, options.rounds + 1):
            order = names[:: 1 if number % 2 else -1]
            with turns(len(order), 2, TURN) as each:
                arms = [partial(train_rank, n, replace(task, turns=turn)) for n, turn in zip(order, each, strict=True)]
                answers = side_by_side(2, arms)
            for name, samples in zip(order, answers, strict=True):
                sample = Sample(sum(rank.cpu_s for rank in samples), max(rank.wall_s for rank in samples))
                comparison.samples[name].append(sample)
            print(f"  {comparison.title}: round {number} of {options.rounds}", flush=True)
    return comparison


def train_rank(arm: str, task: Task) -> Sample:
    from .loops import hand_pp, project

    return hand_pp.train(task) if arm == "hand" else project.train(task)
