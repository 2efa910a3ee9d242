"""How cost grows: slopes, not points.

CPU time of an optimizer step against the number of metrics and of steps so far, of a model of one vector, whose step
takes what the loop takes. A slope is a straight line fitted in each round. What a step sends is no time:
tests/parallel/test_traffic.py counts it.

Targets: a metric costs at most a tenth of one by `self.log`; 5,000 steps leave time and memory where they were.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch

from .arms import Arm, Comparison, compare
from .loops import lightning, project
from .loops.stopwatch import Stopwatch
from .loops.task import Task, prepare
from .record import Figure, Options, Result

NAME = "growth"
METRICS = (0, 10, 30)
DRIFT_STEPS, DRIFT_WINDOW = 5000, 500


def run(options: Options) -> Result:
    torch.set_num_threads(1)
    quick = options.quick
    with tempfile.TemporaryDirectory() as folder:
        task = Task(Path(folder), steps=12 if quick else 220, warm=2 if quick else 60)
        prepare(task, texts=20 if quick else 200)
        loops = {"track": project, "log": lightning}
        arms: dict[str, Arm] = {
            f"{arm} {size}": partial(loop.train, task, size) for arm, loop in loops.items() for size in METRICS
        }
        metrics = compare(Comparison("metrics more in each step", "optimizer step", "track 0"), arms, options.rounds)
        more = [a / b for a, b in zip(slopes(metrics, "track"), slopes(metrics, "log"), strict=True)]
        figures = [Figure("a metric more: `self.track` over `self.log`", more, at_most=0.1), *drift(task, options)]
    return Result(NAME, [metrics], figures)


def slopes(comparison: Comparison, arm: str) -> list[float]:
    """CPU seconds of a step per metric more, in each round."""
    rounds = zip(*(comparison.samples[f"{arm} {size}"] for size in METRICS), strict=True)
    return [float(np.polyfit(METRICS, [sample.cpu_s for sample in each], 1)[0]) for each in rounds]


class Windows(Stopwatch):
    """CPU time of each window of steps, and the process's memory at its end."""

    def __init__(self, task: Task, every: int) -> None:
        super().__init__(task)
        self.every, self.last = every, time.process_time()
        self.seen: dict[int, tuple[float, int]] = {}

    def tick(self, step: int) -> None:
        super().tick(step)
        if step % self.every == 0 and step not in self.seen:
            now = time.process_time()
            self.seen[step] = now - self.last, psutil.Process().memory_info().rss
            self.last = now


def drift(task: Task, options: Options) -> list[Figure]:
    """Of one long training per round: its last windows over its second and third, the first being the warm-up."""
    steps, every = (24, 4) if options.quick else (DRIFT_STEPS, DRIFT_WINDOW)
    time_ratios, memory_mib = [], []
    for _ in range(min(options.rounds, 3)):
        long = replace(task, steps=steps, warm=1)
        windows = Windows(long, every)
        with patch.object(project, "Stopwatch", lambda _, windows=windows: windows):
            arm: dict[str, Any] = {"project": partial(project.train, long)}
            compare(Comparison(f"{steps} steps", "optimizer step", "project"), arm, 1, warm=False)
        cpu_s, memory = zip(*windows.seen.values(), strict=True)
        time_ratios.append(sum(cpu_s[-2:]) / sum(cpu_s[1:3]))
        memory_mib.append((memory[-1] - memory[1]) / 2**20)
    return [
        Figure(f"CPU time of a step, last fifth of {steps} steps over the second", time_ratios, at_most=1.05),
        Figure(f"memory after {steps} steps less that after {2 * every}", memory_mib, at_most=4, unit="MiB"),
    ]
