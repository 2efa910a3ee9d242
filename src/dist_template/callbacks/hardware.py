"""Hardware metrics: memory of every rank, and an NVIDIA GPU's utilization, power, temperature and clocks."""

from __future__ import annotations

import math
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import psutil
import torch
from lightning.pytorch import Callback

from ..cluster.environment import memory_limit
from ..model.any_module import metrics_of
from ..records import GIB

HOST_EVERY_S = 1.0  # /proc is read at most so often: it takes 0.1 ms, and a log step of a small model a few ms
# Clocks throttled by the hardware, by heat or by the power supply (nvml.h, nvmlClocksEventReason*). The software power
# cap is excluded: under large matrix products a healthy GPU always runs at it.
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
# metric -> its reduction over the ranks
MEMORY: dict[str, Callable[[list[float]], float]] = dict.fromkeys(
    ("memory/allocated_gib", "memory/reserved_gib", "memory/peak_share"), max
)
GPU: dict[str, Callable[[list[float]], float]] = {
    "gpu/utilization": statistics.fmean,
    "gpu/power_w": statistics.fmean,
    "gpu/temperature_c": max,
    "gpu/throttled": statistics.fmean,
}


class Hardware(Callback):
    """Logs memory/* and gpu/* over all ranks, at log steps.

    On a GPU, memory is the peak of torch's allocator since the last log step, without other libraries (NCCL, the CUDA
    context). On a CPU it is the process's resident memory, and the larger of two shares: of the memory of the host (or
    control group) that its ranks share, and of the process's address-space limit; read at most once a second.

    NVIDIA's management library (NVML) is called in a background thread: a call takes up to tens of milliseconds, and
    never returns for a GPU that has fallen off the bus.

    Args:
        gpu_every_s: Seconds between two queries of each GPU. 0 turns gpu/* off.
    """

    def __init__(self, gpu_every_s: float = 5.0) -> None:
        self.gpu_every_s = gpu_every_s
        self._gpu: Sampler | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._host = Host(trainer.num_devices)
        if pl_module.device.type == "cuda" and self.gpu_every_s and torch.version.hip is None:
            self._gpu = Sampler(pl_module.device, self.gpu_every_s)

    def before_log_step(self, trainer: Any, module: Any) -> None:
        device = module.device
        memory = of_gpu(device) if device.type == "cuda" else self._host.now()
        values = dict(zip(MEMORY, memory, strict=True))
        if device.type == "cuda":  # every rank must send the same names
            values |= dict.fromkeys(GPU, math.nan) | (self._gpu.newest if self._gpu else {})
        for name, value in values.items():
            metrics_of(module).put_of_rank(name, value)

    def on_log_step(self, trainer: Any, module: Any, metrics: dict[str, float]) -> None:
        for name, join in (MEMORY | GPU).items():
            if known := [v for v in metrics_of(module).of_ranks.get(name, []) if not math.isnan(v)]:
                metrics[name] = join(known)

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if self._gpu:
            self._gpu.stop()
            self._gpu = None


def of_gpu(device: torch.device) -> tuple[float, float, float]:
    """Returns GiB allocated, GiB reserved and the device's share, peaks since the last call. No device sync."""
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    reserved = stats["reserved_bytes.all.peak"]
    total = torch.cuda.get_device_properties(device).total_memory
    return stats["allocated_bytes.all.peak"] / GIB, reserved / GIB, reserved / total


class Host:
    """The same for a CPU process, one of `num_ranks` on the host. The limits are read once."""

    def __init__(self, num_ranks: int) -> None:
        self._process = psutil.Process()
        self._limit = memory_limit() / num_ranks
        addresses = self._process.rlimit(psutil.RLIMIT_AS)[0] if hasattr(psutil, "RLIMIT_AS") else -1  # Linux
        self._addresses = addresses if addresses > 0 else math.inf
        self._read = -math.inf

    def now(self) -> tuple[float, float, float]:
        if time.monotonic() - self._read >= HOST_EVERY_S:
            self._read, used = time.monotonic(), self._process.memory_info()
            share = max(used.rss / self._limit, used.vms / self._addresses)
            self._newest = used.rss / GIB, used.rss / GIB, share
        return self._newest


class Sampler:
    """Queries NVML for one GPU periodically; figures that it does not support are missing from `newest`."""

    def __init__(self, device: torch.device, every_s: float) -> None:
        self.newest: dict[str, float] = {}
        self._uuid = str(torch.cuda.get_device_properties(device).uuid)
        self._every_s = every_s
        self._stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="gpu sampler", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        import pynvml

        try:
            pynvml.nvmlInit()
            # By UUID: indices differ, since CUDA counts only the visible GPUs and may order them by speed.
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{self._uuid.removeprefix('GPU-')}")
        except pynvml.NVMLError as error:
            warnings.warn(f"no gpu/* metrics: NVML reports: {error}", stacklevel=2)
            return
        figures: dict[str, Callable[[], float]] = {
            "gpu/utilization": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu/power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu/temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "gpu/throttled": lambda: bool(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & THROTTLED),
        }
        while True:
            for name, query in list(figures.items()):
                try:
                    self.newest = self.newest | {name: float(query())}
                except pynvml.NVMLError as error:
                    warnings.warn(f"no {name}: NVML reports: {error}", stacklevel=2)
                    del figures[name]
                    self.newest = {n: value for n, value in self.newest.items() if n != name}
            if self._stopped.wait(self._every_s):
                return
