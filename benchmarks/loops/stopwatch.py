"""When an arm's time is taken: the same steps of every loop."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..arms import Clock, Sample
from .task import Task


@dataclass
class Stopwatch:
    """Takes time from the end of step `warm` to the end of the last, of this arm's turns where arms take turns."""

    task: Task
    sample: Sample | None = None
    _clock: Clock = field(default_factory=Clock)
    _cpu_s: float = 0.0
    _wall_s: float = 0.0

    def tick(self, step: int) -> None:
        """At the end of each optimizer step, the first being 1."""
        task, turns = self.task, self.task.turns
        timed = step - task.warm
        if timed == 0:
            self._begin()
        elif step == task.steps:
            self._end()
            self.sample = Sample(self._cpu_s / timed, self._wall_s / timed)
            if turns:
                turns.wait()  # what an arm does at its end is in no other's turn
                turns.pass_on()
        elif turns and timed > 0 and timed % turns.steps == 0:
            self._end()
            self._begin()

    def _begin(self) -> None:
        if self.task.turns:
            self.task.turns.wait()
        self._wait_for_device()
        self._clock.start()

    def _end(self) -> None:
        self._wait_for_device()
        took = self._clock.stop()
        self._cpu_s += took.cpu_s
        self._wall_s += took.wall_s
        if self.task.turns:
            self.task.turns.pass_on()

    def _wait_for_device(self) -> None:
        if self.task.device == "cuda":
            torch.cuda.synchronize()

    def result(self) -> Sample:
        assert self.sample is not None, "the loop ended before its last step"
        return self.sample
