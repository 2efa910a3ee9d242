"""How cost grows: slopes, not points.

CPU time of an optimizer step against the number of metrics, callbacks, parameter tensors, ranks, tokens of a sequence,
entries of the vocabulary, and steps so far. The first four and the lengths use a model of vectors, whose step takes
what the loop takes; a slope is a straight line fitted in each round, and is reported as a ratio to the same run's
hand-written loop or to its slope. What a step sends is counted on two to four processes and set against the cost model
of `benchmarks/traffic.py`, which goes on to 1,024.

Targets: a metric costs at most a tenth of one by `self.log`; tensors, tokens and vocabulary cost no more than in it;
5,000 steps leave time and memory where they were.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from . import ROOT
from .arms import Comparison, Sample, compare
from .loops import hand, lightning, project
from .loops.stopwatch import Stopwatch
from .loops.task import SMALL, Task, prepare
from .record import Figure, Options, Result

NAME = "growth"
DRIFT_STEPS, DRIFT_WINDOW = 5000, 500
COUNTED = {"ddp": (2, 4), "fsdp2": (2, 3, 4), "hsdp": (4,), "zero2": (2, 4), "zero3": (2, 4), "tp": (2,)}


def run(options: Options) -> Result:
    torch.set_num_threads(1)
    result = Result(NAME)
    with tempfile.TemporaryDirectory() as folder:
        task = Task(Path(folder), steps=12 if options.quick else 220, warm=2 if options.quick else 60)  # as step.py
        prepare(task, texts=20 if options.quick else 200)
        sent = counted(task, options)  # first: the processes that it starts have imported what the others' need
        for number, sweep in enumerate(SWEEPS):
            runs = sweep.runs(task, options.quick)
            comparison = Comparison(f"{sweep.title}: {sweep.unit}", "optimizer step", next(iter(runs)))
            warm = number == 0 and not options.quick
            result.comparisons.append(compare(comparison, runs, options.rounds, warm))
        result.figures = figures({each.title.partition(":")[0]: each for each in result.comparisons})
        result.figures += [*drift(task, options), *sent]
    return result


def slopes(comparison: Comparison, arm: str) -> list[float]:
    """CPU seconds of a step per one more, in each round."""
    return [float(np.polyfit(*zip(*points, strict=True), 1)[0]) for points in rounds(comparison, arm)]


def rounds(comparison: Comparison, arm: str) -> list[list[tuple[int, float]]]:
    """(size, CPU seconds of a step) of each size, in each round."""
    sizes = [int(name.split()[-1]) for name in comparison.samples if name.rpartition(" ")[0] == arm]
    samples = zip(*(comparison.samples[f"{arm} {size}"] for size in sizes), strict=True)
    return [[(size, s.cpu_s) for size, s in zip(sizes, row, strict=True)] for row in samples]


def figures(by_title: dict[str, Comparison]) -> list[Figure]:
    metrics, callbacks = by_title["metrics"], by_title["callbacks"]
    step = [row[0][1] for row in rounds(metrics, "hand")]
    track, log = slopes(metrics, "project"), slopes(metrics, "self.log")
    found = [
        Figure("a metric more: `self.track` over `self.log`", quotients(track, log), at_most=0.1),
        Figure("a metric more, in hand-written steps of the same model", quotients(track, step)),
        Figure("a callback more that acts after each step, in hand-written steps",
               quotients(slopes(callbacks, "project"), [row[0][1] for row in rounds(callbacks, "hand")])),
    ]  # fmt: skip
    for title in ("tensors", "tokens", "vocabulary"):
        one = by_title[title]
        ratios = quotients(slopes(one, "project"), slopes(one, "hand"))
        found.append(Figure(f"slope over {title}, project over hand", ratios, at_most=1.1))
    for size in [int(name.split()[-1]) for name in by_title["ranks"].samples if name.startswith("project")]:
        ratios = by_title["ranks"].cpu_ratios(f"project {size}", f"hand {size}")
        found.append(Figure(f"0.1M, DDP on {size} ranks: CPU time of a rank, project over hand", ratios))
    return found


def quotients(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


# ---- what grows ------------------------------------------------------------------------------------------------------


class Idle(Callback):
    """Acts after each step, and has nothing to do."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None: ...


class Vectors(nn.Module):
    """As many parameter tensors as are asked for, each of 8 numbers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(8) for _ in range(count))

    def forward(self, **batch: Tensor) -> Tensor:
        return torch.cat(list(self.weights)).sum() * 0.01 + 1.0


@dataclass(frozen=True)
class VectorTask(Task):
    count: int = 1

    def build(self) -> nn.Module:
        return Vectors(self.count)


class Logging(lightning.Module):
    """Lightning's defaults with further values by `self.log`."""

    def __init__(self, task: Task, extra: int) -> None:
        super().__init__(task)
        self.extra = extra

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for number in range(self.extra):
            self.log(f"train/more_{number}", loss)
        return loss


def by_hand(task: Task, size: int) -> Sample:
    return hand.train(task)


def tracked(task: Task, size: int) -> Sample:
    return project.train(task, extra_metrics=size)


def logged(task: Task, size: int) -> Sample:
    with patch.object(lightning, "Module", partial(Logging, extra=size)):
        return lightning.train(task)


def with_callbacks(task: Task, size: int) -> Sample:
    return project.train(replace(task, flags=(f"--trainer.callbacks+={Idle.__module__}.Idle",) * size))


def vectors(train: Callable[[Task], Sample], task: Task, size: int) -> Sample:
    return train(VectorTask(task.folder, steps=task.steps, warm=task.warm, count=size))


def lengths(train: Callable[[Task], Sample], task: Task, size: int) -> Sample:
    return train(replace(task, seq_len=size))


def vocabularies(train: Callable[[Task], Sample], task: Task, size: int) -> Sample:
    steps, warm = (task.steps // 10, task.warm // 10) if task.steps > 12 else (task.steps, task.warm)
    small = SMALL | {"vocab_size": size}
    return train(replace(task, architecture=small, seq_len=64, steps=steps, warm=warm, log_every=5))


def ranks(arm: str, task: Task, size: int) -> Sample:
    """CPU time of a rank; wall time of the slowest."""
    from .dist import train_rank
    from .ranks import on_ranks

    steps = 110 if task.steps > 12 else task.steps
    small = replace(task, architecture=SMALL, strategy="ddp" if size > 1 else "auto", steps=steps)
    each = on_ranks(size, train_rank, arm, small)
    return Sample(sum(one.cpu_s for one in each) / size, max(one.wall_s for one in each))


@dataclass(frozen=True)
class Sweep:
    """What grows, in which sizes, and under which arms; the first arm's first size is the reference."""

    title: str
    unit: str
    sizes: tuple[int, ...]
    arms: dict[str, Callable[[Task, int], Sample]]
    by_hand: Callable[[Task, int], Sample] | None = None  # once, where it does not grow

    def runs(self, task: Task, quick: bool) -> dict[str, Callable[[], Sample]]:
        sizes = self.sizes[:2] if quick else self.sizes
        once = {f"hand {sizes[0]}": partial(self.by_hand, task, sizes[0])} if self.by_hand else {}
        return once | {
            f"{arm} {size}": partial(train, task, size) for arm, train in self.arms.items() for size in sizes
        }


BOTH = {"hand": hand.train, "project": project.train}
SWEEPS = (
    Sweep("metrics", "more in each step", (0, 10, 30), {"project": tracked, "self.log": logged}, by_hand),
    Sweep("callbacks", "more of them", (0, 10, 30), {"project": with_callbacks}, by_hand),
    Sweep("tensors", "of parameters", (1, 50, 200), {name: partial(vectors, loop) for name, loop in BOTH.items()}),
    Sweep("tokens", "of a sequence", (32, 512, 2048), {name: partial(lengths, loop) for name, loop in BOTH.items()}),
    Sweep("vocabulary", "entries, 0.1M model", (1024, 4096, 16384),
          {name: partial(vocabularies, loop) for name, loop in BOTH.items()}),
    Sweep("ranks", "under DDP, 0.1M model", (1, 2, 3, 4), {name: partial(ranks, name) for name in BOTH}),
)  # fmt: skip


# ---- steps -----------------------------------------------------------------------------------------------------------


class Windows(Stopwatch):
    """CPU time of each window of steps, and the process's memory at its end."""

    every = DRIFT_WINDOW

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.cpu_s: list[float] = []
        self.memory: list[int] = []
        self.last = time.process_time()

    def tick(self, step: int) -> None:
        super().tick(step)
        if step % self.every == 0 and len(self.cpu_s) < step // self.every:
            now = time.process_time()
            self.cpu_s.append(now - self.last)
            self.memory.append(psutil.Process().memory_info().rss)
            self.last = now


def drift(task: Task, options: Options) -> list[Figure]:
    """Of one long training per round: its last windows over its second and third, the first being the warm-up."""
    steps, every = (24, 4) if options.quick else (DRIFT_STEPS, DRIFT_WINDOW)
    time_ratios, memory_mib = [], []
    for number in range(min(options.rounds, 3)):
        windows: list[Windows] = []

        def watch(task: Task, windows: list[Windows] = windows, every: int = every) -> Windows:
            windows.append(Windows(task))
            windows[-1].every = every
            return windows[-1]

        sample: dict[str, Callable[[], Sample]] = {}
        with patch.object(project, "Stopwatch", watch):
            long = replace(task, steps=steps, warm=1)
            sample["project"] = partial(project.train, long)
            title = f"{steps} steps, {number + 1} of {min(options.rounds, 3)}"
            compare(Comparison(title, "optimizer step", "project"), sample, 1, warm=False)
        (seen,) = windows
        time_ratios.append(sum(seen.cpu_s[-2:]) / sum(seen.cpu_s[1:3]))
        memory_mib.append((seen.memory[-1] - seen.memory[1]) / 2**20)
    return [
        Figure(f"CPU time of a step, last fifth of {steps} steps over the second", time_ratios, at_most=1.05),
        Figure(f"memory after {steps} steps less that after {2 * every}", memory_mib, at_most=4, unit="MiB"),
    ]


# ---- what is sent ----------------------------------------------------------------------------------------------------


def counted(task: Task, options: Options) -> list[Figure]:
    """Bytes that a rank really sends in a step, over the cost model's."""
    from dist_template.parallel.estimates.facts import Sent
    from tests.support.collectives import CountCollectives, read_sent, summed
    from tests.support.runs import Workers

    from .loops.task import data_flags
    from .traffic import Setting, traffic

    configs, found = ROOT / "build" / "dev" / "configs" / "strategy", []
    for strategy, sizes in list(COUNTED.items())[: 1 if options.quick else None]:
        for size in sizes[:1] if options.quick else sizes:
            shared = size if strategy == "tp" else 1
            record = task.folder / f"{strategy}-{size}"
            argv = ["fit", f"--run.root={record / 'runs'}", "--run.report=false", f"--config={configs}/{strategy}.yaml"]
            argv += [*data_flags(task, size // shared), f"--model.architecture={SMALL}", f"--trainer.devices={size}"]
            argv += ["--trainer.accelerator=cpu", "--trainer.max_steps=4", "--trainer.log_every_n_steps=100"]
            argv += ZERO3 if strategy == "zero3" else []
            with Workers(size) as workers:
                workers.run(argv, record, callbacks=[CountCollectives(record)]).check()
            node = min(size, 2) if strategy == "hsdp" else size
            at = Setting(size, task.batch_size * task.seq_len, node=node, half=False)
            said, seen = summed(traffic(strategy, task_model(task), at)), read_sent(record)
            over = {"hsdp": 2}.get(strategy, size)
            real = sum(Sent(kind, n, 4, over, over).sent for kind, n in seen.items())  # ty: ignore[invalid-argument-type]
            model = sum(Sent(kind, n, 4, over, over).sent for kind, n in said.items())  # ty: ignore[invalid-argument-type]
            found.append(Figure(f"sent by {strategy} on {size} ranks, counted over the cost model", [real / model]))
    return found


ZERO3 = [  # a model so small would else stay whole
    "--trainer.strategy.init_args.param_persistence_threshold=16",
    "--trainer.strategy.init_args.prefetch_bucket_size=0",
]


def task_model(task: Task) -> nn.Module:
    with torch.device("meta"):
        return replace(task, architecture=SMALL).build()
