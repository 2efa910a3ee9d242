"""Takes the time of `fit`'s steps and of a bare loop's, in turn, for `bench`."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import psutil
import torch
from lightning.pytorch import Callback

from ..callbacks.throughput import peak_of
from ..errors import InputError
from ..model.flops import Size
from .traffic import STRATEGIES, Setting

WINDOWS = 3  # of each, after one to warm up
# Without which a model cannot be cut so.
PLANS = {"tp": "tp_plan", "fsdp2_tp": "tp_plan", "fsdp2_ep": "ep_plan", "fsdp2_tp_ep": "ep_plan"}


class Measured(NamedTuple):
    """Of one training.

    Args:
        fit_s: Seconds of a step of `fit`, per window.
        bare_s: The same of the bare loop.
        wait_share: Of the time of `fit`'s steps: until the loader had the batch.
        peak_gib: Memory: a GPU's live tensors at their highest; without one, of the process.
        tflops: Operations of a token / 10^12; None where the model does not tell.
        peak_tflops: Of the device; None where it is not known.
        sent: Strategy -> (bytes, messages) that a rank would send in a step.
    """

    fit_s: list[float]
    bare_s: list[float]
    wait_share: float
    peak_gib: float
    tflops: float | None
    peak_tflops: float | None
    sent: dict[str, tuple[float, int]]


class Windows(Callback):
    """Ends training when it has measured. One micro-batch per optimizer step, one process.

    The bare loop is forward, backward, clipping and step, with the same module and optimizer, on the newest batch.

    Args:
        steps: Of a window.
        ranks: Processes of the real run, to reckon what they would send.
    """

    def __init__(self, steps: int, ranks: int) -> None:
        self.steps = steps
        self.ranks = ranks
        self._fit_s: list[float] = []
        self._bare_s: list[float] = []
        self._count = self._peak = 0
        self._began = self._ended = self._waited = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._fit_s or self._bare_s:  # not while warming up
            self._waited += max(0.0, getattr(trainer.datamodule, "fetched_s", 0.0) - self._ended)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._count += 1
        if self._count % self.steps == 0:
            device = pl_module.device
            self._fit_s.append((_now(device) - self._began) / self.steps)
            cuda = device.type == "cuda"
            self._peak = torch.cuda.max_memory_allocated(device) if cuda else psutil.Process().memory_info().rss
            self._bare_s.append(self._bare(trainer, pl_module, batch))
            trainer.should_stop = len(self._fit_s) == 1 + WINDOWS
            self._began = _now(device)
        self._ended = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if len(self._fit_s) < 1 + WINDOWS:
            raise InputError(
                f"training ended after {self._count} steps, bench needs {(1 + WINDOWS) * self.steps}:"
                " lower --steps, or raise trainer.max_steps"
            )
        model, data = getattr(pl_module, "model", pl_module), trainer.datamodule
        flops = Size.of(model).flops_per_token(data.seq_len)
        at = Setting(self.ranks, data.micro_batch_size * data.seq_len, half="32" not in str(trainer.precision))
        able = [name for name in STRATEGIES if self.ranks > 1 and getattr(model, PLANS.get(name, "training"), None)]
        sent = {name: list(STRATEGIES[name](model, at)) for name in able}
        self.measured = Measured(
            self._fit_s[1:],
            self._bare_s[1:],
            self._waited / (sum(self._fit_s[1:]) * self.steps),
            self._peak / 2**30,
            flops and flops / 1e12,
            peak_of(pl_module.device, str(trainer.precision)),
            {name: (sum(one.sent for one in all_), sum(one.messages for one in all_)) for name, all_ in sent.items()},
        )

    def _bare(self, trainer: Any, module: Any, batch: Any) -> float:
        """Seconds of a step of the loop that one writes by hand."""
        (optimizer,), precision = trainer.optimizers, trainer.precision_plugin
        scaler = getattr(precision, "scaler", None)  # of 16-mixed
        limit = trainer.gradient_clip_val or float("inf")
        began = _now(module.device)
        for number in range(self.steps):
            with precision.train_step_context():
                loss = module.training_step(batch, number)
            (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        return (_now(module.device) - began) / self.steps


def _now(device: torch.device) -> float:
    """When all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
