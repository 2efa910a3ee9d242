"""When an arm's time is taken: the same steps of every loop."""

import torch

from ..arms import Clock, Sample
from .task import Task


class Stopwatch:
    """Takes time from the end of step `warm` to the end of the last, in this arm's turns where arms
    take turns."""

    def __init__(self, task: Task) -> None:
        self.task, self.clock = task, Clock()
        self.cpu_s = self.wall_s = 0.0

    def tick(self, step: int) -> None:
        """At the end of each optimizer step, the first being 1."""
        task, turns = self.task, self.task.turns
        timed = step - task.warm
        if timed == 0:
            self._start()
        elif step == task.steps:
            self._stop()
            self.sample = Sample(self.cpu_s / timed, self.wall_s / timed)
            if turns:
                turns.wait()  # what an arm does at its end is in no other's turn
                turns.pass_on()
        elif turns and timed > 0 and timed % turns.steps == 0:
            self._stop()
            self._start()

    def _start(self) -> None:
        if self.task.turns:
            self.task.turns.wait()
        if self.task.device == "cuda":
            torch.cuda.synchronize()
        self.clock.start()

    def _stop(self) -> None:
        if self.task.device == "cuda":
            torch.cuda.synchronize()
        took = self.clock.stop()
        self.cpu_s, self.wall_s = self.cpu_s + took.cpu_s, self.wall_s + took.wall_s
        if self.task.turns:
            self.task.turns.pass_on()
