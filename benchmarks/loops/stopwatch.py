"""When an arm's time is taken: the same steps of every loop."""

import torch

from ..arms import Clock, InTurns, Sample
from .task import Task


class Stopwatch:
    """Takes time from the end of step `warm` to the end of the last, in this arm's turns where arms
    take turns."""

    def __init__(self, task: Task) -> None:
        self.task, self.clock = task, Clock()
        self.turns: list[Sample] = []  # of which there is one where arms take none

    def tick(self, step: int) -> None:
        """At the end of each optimizer step, the first being 1."""
        task, turns = self.task, self.task.turns
        timed = step - task.warm
        if timed == 0:
            self._start()
        elif step == task.steps:
            self._stop()
            each = turns.steps if turns else timed
            self.turns = [Sample(one.cpu_s / each, one.wall_s / each) for one in self.turns]
            cpu_s = sum(one.cpu_s for one in self.turns) / len(self.turns)
            wall_s = sum(one.wall_s for one in self.turns) / len(self.turns)
            self.sample = Sample(cpu_s, wall_s)
            if turns:
                self.sample = InTurns(cpu_s, wall_s, tuple(self.turns))
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
        self.turns.append(self.clock.stop())
        if self.task.turns:
            self.task.turns.pass_on()
