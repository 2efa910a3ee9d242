"""Measures throughput, model FLOPs utilization, the slowest rank and memory, without a device
sync."""

import statistics
import time

import lightning as L
import psutil
import torch
from torch import Tensor

from ..cluster.memory import memory_limit
from ..model.any_module import data_of, metrics_of, samples_of, size_of
from ..model.flops import peak
from ..records import GIB
from ..run_callback import RunCallback

OWN = "rank/own_step_s"  # of each rank, sent to all
WORK = "rank/work"  # likewise, in tokens
MEMORY = ("memory/allocated_gib", "memory/reserved_gib", "memory/peak_share")  # likewise


class Throughput(RunCallback):
    """Logs perf/*, train/tokens or train/samples, memory/*, and with several ranks rank/*.

    The time between two log steps is exact on any device, because a log step ends in a transfer
    that waits for the device. Validation and checkpoints are excluded from it, with the wait for
    the batch after them.

    rank/* compares the work that ranks are assigned, by the lengths of their documents, and each
    rank's own time for a step, by the host's clock: waiting for its loader, then forward. On a GPU
    it shows slow hosts, not slow GPUs. In a forward pass with collectives ranks wait for each
    other: then only a slow loader shows.

    memory/* is the largest of all ranks: the peak of torch's allocator since the last log step, or
    the resident memory of a CPU process and its share of the memory of the host (or control group)
    that its ranks share."""

    def __init__(self) -> None:
        self._window_s = self._wait_s = self._own_s = 0.0
        self._window_step = self._window_samples = 0
        self._last_end: float | None = None  # of the batch before; None after a validation or save
        self._flops: float | None = None  # per token
        self._seq_len: int | None = None  # None: samples are not sequences
        self._peak_tflops: float | None = None
        self._started = 0.0  # forward

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        device = pl_module.device
        self._window_step = trainer.global_step
        samples = samples_of(trainer)
        if samples:
            self._window_samples = samples.consumed_samples
        self._last_end = time.perf_counter()
        self._seq_len = getattr(data_of(trainer), "seq_len", None)
        if self._seq_len:
            self._flops = size_of(pl_module).flops_per_token(self._seq_len)
        if device.type == "cuda":
            self._peak_tflops = peak(torch.cuda.get_device_name(device), str(trainer.precision))
        self._limit = memory_limit() / trainer.num_devices

    def on_train_batch_start(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        now = time.perf_counter()
        if self._last_end is None:
            self._last_end = now
        self._wait_s += now - self._last_end
        # Then the rank waits for the others, to sum token counts: that is not its own time.
        fetched = getattr(data_of(trainer), "fetched_s", now)
        self._own_s += max(0.0, fetched - self._last_end)
        self._started = now

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        now = time.perf_counter()
        self._own_s, self._started = self._own_s + now - self._started, now

    def on_train_batch_end(self, *_: object, **__: object) -> None:
        now = time.perf_counter()
        if self._last_end is not None:
            self._window_s += now - self._last_end
        self._last_end = now

    def before_log_step(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        metrics, steps = metrics_of(module), trainer.global_step - self._window_step
        metrics.put("perf/step_s", self._window_s / steps)
        metrics.put("perf/data_wait_share", self._wait_s / self._window_s)
        samples = samples_of(trainer)
        if samples:
            total = samples.consumed_samples
            per_s = (total - self._window_samples) / self._window_s
            self._window_samples = total
            metrics.put("perf/samples_per_s", per_s)
            if self._seq_len:
                metrics.put("train/tokens", total * self._seq_len)
                per_s *= self._seq_len
                metrics.put("perf/tokens_per_s", per_s)
                metrics.put("perf/tokens_per_s_per_device", per_s / trainer.world_size)
            else:
                metrics.put("train/samples", total)
            if self._flops:
                tflops = per_s / trainer.world_size * self._flops / 1e12
                metrics.put("perf/model_tflops", tflops)
                if self._peak_tflops:
                    metrics.put("perf/mfu", tflops / self._peak_tflops)
        if trainer.world_size > 1:
            metrics.put_of_rank(OWN, self._own_s / steps)
            take_work = getattr(data_of(trainer), "take_work", None)
            if take_work:
                metrics.put_of_rank(WORK, take_work())
        for name, value in zip(MEMORY, self._memory_now(module.device), strict=True):
            metrics.put_of_rank(name, value)
        self._window_s = self._wait_s = self._own_s = 0.0
        self._window_step = trainer.global_step

    def add_metrics(
        self, trainer: L.Trainer, module: L.LightningModule, metrics: dict[str, float]
    ) -> None:
        of_ranks = metrics_of(module).of_ranks
        times_s = of_ranks.get(OWN)
        if times_s:
            slowest = max(times_s)
            metrics["rank/slowest"] = times_s.index(slowest)
            metrics["rank/slowest_over_median"] = slowest / statistics.median_low(times_s)
        works = of_ranks.get(WORK)
        if works and sum(works):
            metrics["rank/work_over_mean"] = max(works) / statistics.fmean(works)
        for name in MEMORY:
            metrics[name] = max(of_ranks[name])

    def on_validation_end(self, *_: object, **__: object) -> None:
        self._last_end = None

    on_save_checkpoint = on_validation_end

    def _memory_now(self, device: torch.device) -> tuple[float, float, float]:
        """Returns GiB allocated, GiB reserved, and the share of the device or host."""
        if device.type == "cuda":
            stats = torch.cuda.memory_stats(device)  # without a device sync
            torch.cuda.reset_peak_memory_stats(device)
            reserved = stats["reserved_bytes.all.peak"]
            total = torch.cuda.get_device_properties(device).total_memory
            return stats["allocated_bytes.all.peak"] / GIB, reserved / GIB, reserved / total
        used = psutil.Process().memory_info().rss
        return used / GIB, used / GIB, used / self._limit
