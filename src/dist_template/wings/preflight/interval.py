"""The interval of checkpoints that loses least to saves and failures. Without torch.

`estimated` computes it for a run that has not started, and `of_run` for one that has measured its
saves. `of_job` takes the measured one where there is one, for `launch`; `compared` sets it beside
the interval that a run has used.

Young, "A first order approximation to the optimum checkpoint interval" (1974), and Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps" (2006)."""

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...observe.history.run import RunFile
from ..diagnose.expected import last_step, step_s
from ..history import History, of_any_types, read_run

# Llama 3 (arXiv:2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 GPUs.
DEVICE_MTBF_H = 50_700.0
DISK_GB_S = 2.0  # of a node, on a shared file system
HOST_GB_S = 25.0  # of a device to its host's memory: what training waits for if a thread writes
LEAST_S = 0.1  # of any save
BYTES = 12  # of a trained parameter: its weight and AdamW's two moments, in fp32


@dataclass(frozen=True)
class Interval:
    """Seconds that training waits for a save, between two failures of the job, and of a step (0:
    unknown)."""

    save_s: float
    mtbf_s: float
    step_s: float = 0.0

    @property
    def best_s(self) -> float:
        """Seconds of training between two saves, by Daly's equation 37."""
        x = self.save_s / (2 * self.mtbf_s)
        if x >= 1:  # a save takes twice the time between two failures, or more
            return self.mtbf_s
        return 2 * self.mtbf_s * (math.sqrt(x) * (1 + math.sqrt(x) / 3 + x / 9) - x)

    def lost(self, every_s: float) -> float:
        """Returns the share of the time that saves and repeated steps take, by Daly's equation
        20."""
        exponent = min(700, (every_s + self.save_s) / self.mtbf_s)  # exp(710) overflows
        return 1 - every_s / self.mtbf_s / math.expm1(exponent)

    def at(self, every_s: float) -> str:
        """Describes an interval, and the share of the time that it loses."""
        steps = ""
        if self.step_s:
            steps = f"{max(1, round(every_s / self.step_s)):,} steps, "
        return f"every {steps}{every_s / 60:,.1f} min: {100 * self.lost(every_s):.1f} % lost"

    def __str__(self) -> str:
        known = f"a save of {self.save_s:.1f} s, a failure every {self.mtbf_s / 3600:,.1f} h"
        return f"best {self.at(self.best_s)} ({known})"


def estimated(
    trained: int, settings: Any, nodes: int, devices: int, step_s: float = 0.0
) -> Interval:
    """Returns the interval of a run of `settings` that has not started, from the bytes of its
    checkpoint."""
    node_gb_s = settings.preflight.disk_gb_s
    if settings.last_checkpoint.asynchronous:  # training waits for the copy into host memory alone
        node_gb_s = devices * HOST_GB_S
    save_s = LEAST_S + BYTES * trained / 1e9 / nodes / node_gb_s
    mtbf_s = 3600 * settings.preflight.device_mtbf_h / (nodes * devices)
    return Interval(save_s, mtbf_s, step_s)


def of_job(settings: Any, model: object, data: object, runs: Path, nodes: int, devices: int) -> str:
    """Returns a job's interval, measured by the newest run in `runs` or estimated; "" if neither is
    possible."""
    written = sorted(runs.glob(f"*/{RunFile.GOODPUT}"), key=lambda file: file.stat().st_mtime)
    with suppress(InputError):  # a damaged run, or a model that `plan` does not trace
        if written:
            newest = written[-1].parent
            with of_any_types([newest]):
                history = read_run(newest)
                measured = of_run(history, nodes * devices)
            if measured:
                return f"checkpoints: {measured}, measured by {history.name}"
        from ..plan.trace import Traced

        trained = Traced(model, data, on_gpu=False).size.trainable
        return f"checkpoints: {estimated(trained, settings, nodes, devices)}, estimated"
    return ""


def of_run(history: History, world_size: int = 0) -> Interval | None:
    """Returns the interval by the measured stall of a run's saves; None if it has none."""
    every_n_steps = history.key("last_checkpoint.every_n_steps") or 1
    saves = math.ceil(last_step(history) / every_n_steps)  # and one at the end
    spent_s, seconds = history.goodput.get("checkpoint", 0.0), step_s(history)
    if not (saves and spent_s and seconds > 0):
        return None
    devices = world_size or history.fact("machine.world_size") or 1
    mtbf_s = 3600 * history.key("preflight.device_mtbf_h", DEVICE_MTBF_H) / devices
    return Interval(spent_s / saves, mtbf_s, seconds)


def compared(history: History) -> str:
    """Returns the interval that a run has used, and the best one; "" without saves."""
    measured, every_n_steps = of_run(history), history.key("last_checkpoint.every_n_steps")
    if not measured or not every_n_steps:
        return ""
    return f"{measured.at(every_n_steps * measured.step_s)}; {measured}"
