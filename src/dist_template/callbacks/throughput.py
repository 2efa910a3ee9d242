"""Measures throughput, model FLOPs utilization and the slowest rank, without a device sync."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor

from ..model.any_module import data_of, metrics_of, samples_of, size_of
from ..model.flops import peak

OWN = "rank/own_step_s"  # of each rank, sent to all


class Throughput(Callback):
    """Logs perf/*, train/tokens or train/samples, and with several ranks rank/*.

    The time between two log steps is exact on any device, because a log step ends in a transfer that waits for the
    device. Validation and checkpoints are excluded from it, with the wait for the batch after them.

    rank/* compares each rank's own time for a step: waiting for its loader, then forward, before
    gradients are reduced. On a GPU, CUDA events measure forward. If forward contains collectives
    (FSDP, tensor and expert parallelism, ZeRO-3), ranks wait for each other in it and look alike:
    then the loader's part shows a slow host, and gpu/throttled a slow GPU.
    """

    def __init__(self) -> None:
        self._window_s = self._wait_s = self._own_wait_s = 0.0
        self._window_step = 0
        self._last_end: float | None = None  # of the batch before; None after a validation or save
        self._flops: float | None = None  # per token
        self._seq_len: int | None = None  # None: samples are not sequences
        self._peak_tflops: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        device = pl_module.device
        self._window_step = trainer.global_step
        self._last_end = time.perf_counter()
        self._forward = ForwardClock(device)
        self._seq_len = getattr(data_of(trainer), "seq_len", None)
        if self._seq_len:
            size = size_of(pl_module)
            self._flops = size.flops_per_token(self._seq_len)
        self._peak_tflops = peak_of(device, str(trainer.precision))

    def on_train_batch_start(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        now = time.perf_counter()
        if self._last_end is None:
            self._last_end = now
        self._wait_s += now - self._last_end
        # Then the rank waits for the others, to sum token counts: that is not its own time.
        fetched = getattr(data_of(trainer), "fetched_s", now)
        self._own_wait_s += max(0.0, fetched - self._last_end)
        if trainer.world_size > 1:  # else no rank reads, and frees, the passes
            self._forward.start()

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self._forward.stop()

    def on_train_batch_end(self, *_: object, **__: object) -> None:
        now = time.perf_counter()
        self._window_s += now - (self._last_end or now)
        self._last_end = now

    def before_log_step(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        metrics, steps = metrics_of(module), trainer.global_step - self._window_step
        metrics.put("perf/step_s", self._window_s / steps)
        metrics.put("perf/data_wait_share", self._wait_s / self._window_s)
        if samples := samples_of(trainer):
            per_s = steps * samples.global_batch_size / self._window_s
            for name, value in self._of_samples(per_s, trainer.world_size).items():
                metrics.put(name, value)
            total = trainer.global_step * samples.global_batch_size
            if self._seq_len:
                metrics.put("train/tokens", total * self._seq_len)
            else:
                metrics.put("train/samples", total)
        if trainer.world_size > 1:
            forward_s = self._forward.mean_s() * trainer.accumulate_grad_batches
            metrics.put_of_rank(OWN, self._own_wait_s / steps + forward_s)
        self._window_s = self._wait_s = self._own_wait_s = 0.0
        self._window_step = trainer.global_step

    def _of_samples(self, samples_per_s: float, world_size: int) -> dict[str, float]:
        figures = {"perf/samples_per_s": samples_per_s}
        if not self._seq_len:
            return figures
        tokens_per_s = samples_per_s * self._seq_len
        figures["perf/tokens_per_s"] = tokens_per_s
        figures["perf/tokens_per_s_per_device"] = tokens_per_s / world_size
        if self._flops:
            tflops = tokens_per_s / world_size * self._flops / 1e12
            figures["perf/model_tflops"] = tflops
            if self._peak_tflops:
                figures["perf/mfu"] = tflops / self._peak_tflops
        return figures

    def on_log_step(self, trainer: L.Trainer, module: L.LightningModule, metrics: dict[str, float]) -> None:
        times_s = metrics_of(module).of_ranks.get(OWN, [])
        if times_s and not any(map(math.isnan, times_s)):
            slowest = max(times_s)
            metrics["rank/slowest_step_s"] = slowest
            metrics["rank/slowest"] = times_s.index(slowest)
            metrics["rank/slowest_over_median"] = slowest / statistics.median_low(times_s)

    def on_validation_end(self, *_: object, **__: object) -> None:
        self._last_end = None

    on_save_checkpoint = on_validation_end


def peak_of(device: torch.device, precision: str) -> float | None:
    """Returns the peak in TFLOP/s, or None for an unknown device."""
    found = peak(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None
    return found[0] if found else None


class ForwardClock:
    """Times forward passes: by events in a GPU's stream, else on the host."""

    def __init__(self, device: torch.device) -> None:
        self._in_stream = device.type == "cuda"
        self._started: Any = None
        self._passes: list[tuple[Any, Any]] = []  # (start, end): CUDA events, or seconds

    def start(self) -> None:
        self._started = self._now()

    def stop(self) -> None:
        if self._started is not None:
            self._passes.append((self._started, self._now()))
            self._started = None

    def mean_s(self) -> float:
        """Returns the mean of the finished passes; NaN before the first."""
        seconds = self.seconds()
        return statistics.fmean(seconds) if seconds else math.nan

    def seconds(self) -> list[float]:
        """Returns the times of the passes that have finished since the last call."""
        if self._in_stream:  # unfinished ones count the next time
            done = [each for each in self._passes if each[1].query()]
            seconds = [start.elapsed_time(end) / 1e3 for start, end in done]
        else:
            done = self._passes
            seconds = [end - start for start, end in done]
        self._passes = self._passes[len(done) :]
        return seconds

    def _now(self) -> Any:
        if not self._in_stream:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
