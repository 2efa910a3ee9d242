"""Hardware metrics: memory of every rank; utilization, power, temperature and clocks of GPUs."""

from __future__ import annotations

import math
import statistics
import threading
import time
import warnings
from collections.abc import Callable

import lightning as L
import psutil
import torch
from lightning.pytorch import Callback

from ..cluster.environment import memory_limit
from ..model.any_module import metrics_of
from ..records import GIB

HOST_EVERY_S = 1.0  # /proc takes 0.1 ms to read, and a log step of a small model a few ms
# Clocks throttled by the hardware, by heat or by the power supply (nvml.h, nvmlClocksEventReason*). The software power
# cap is excluded: under large matrix products a healthy GPU always runs at it.
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
Reduction = Callable[[list[float]], float]  # over the ranks
MEMORY: dict[str, Reduction] = {
    "memory/allocated_gib": max,
    "memory/reserved_gib": max,
    "memory/peak_share": max,
}
GPU: dict[str, Reduction] = {
    "gpu/utilization": statistics.fmean,
    "gpu/power_w": statistics.fmean,
    "gpu/temperature_c": max,
    "gpu/throttled": statistics.fmean,
}


class Hardware(Callback):
    """Logs memory/* and gpu/* over all ranks, at log steps.

    On a GPU, memory is the peak of torch's allocator since the last log step, without other
    libraries (NCCL, the CUDA context). On a CPU it is the process's resident memory, and its share
    of the memory of the host (or control group) that its ranks share.

    NVIDIA's management library (NVML) is called in a background thread: a call takes up to tens of
    milliseconds, and never returns for a GPU that has fallen off the bus.

    Args:
        gpu_every_s: Seconds between two queries of each GPU. 0 turns gpu/* off.
    """

    def __init__(self, gpu_every_s: float = 5.0) -> None:
        self.gpu_every_s = gpu_every_s
        self._gpu: Sampler | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._host = Host(trainer.num_devices)
        if pl_module.device.type == "cuda" and self.gpu_every_s and torch.version.hip is None:
            self._gpu = Sampler(pl_module.device, self.gpu_every_s)

    def before_log_step(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        is_cuda = module.device.type == "cuda"
        memory = of_gpu(module.device) if is_cuda else self._host.now()
        values = dict(zip(MEMORY, memory, strict=True))
        if is_cuda:  # every rank must send the same names
            values |= dict.fromkeys(GPU, math.nan) | (self._gpu.newest if self._gpu else {})
        for name, value in values.items():
            metrics_of(module).put_of_rank(name, value)

    def on_log_step(self, trainer: L.Trainer, module: L.LightningModule, metrics: dict[str, float]) -> None:
        of_ranks = metrics_of(module).of_ranks
        for name, reduce in (MEMORY | GPU).items():
            known = [value for value in of_ranks.get(name, []) if not math.isnan(value)]
            if known:
                metrics[name] = reduce(known)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._gpu:
            self._gpu.stop()
            self._gpu = None


def of_gpu(device: torch.device) -> tuple[float, float, float]:
    """Returns peaks since the last call: GiB allocated, GiB reserved, share of the device."""
    stats = torch.cuda.memory_stats(device)  # without a device sync
    torch.cuda.reset_peak_memory_stats(device)
    reserved = stats["reserved_bytes.all.peak"]
    total = torch.cuda.get_device_properties(device).total_memory
    return stats["allocated_bytes.all.peak"] / GIB, reserved / GIB, reserved / total


class Host:
    """The same for a CPU process, one of `num_ranks` on the host."""

    def __init__(self, num_ranks: int) -> None:
        self._limit = memory_limit() / num_ranks
        self._read = -math.inf

    def now(self) -> tuple[float, float, float]:
        if time.monotonic() - self._read >= HOST_EVERY_S:
            self._read, used = time.monotonic(), psutil.Process().memory_info().rss
            self._newest = used / GIB, used / GIB, used / self._limit
        return self._newest


class Sampler:
    """Queries NVML for one GPU periodically; figures that it does not support are NaN."""

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
        import pynvml as nvml

        try:
            nvml.nvmlInit()
            # By UUID: indices differ, because CUDA counts only the visible GPUs.
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{self._uuid.removeprefix('GPU-')}")
        except nvml.NVMLError as error:
            warnings.warn(f"no gpu/* metrics: NVML reports: {error}", stacklevel=2)
            return
        heat = nvml.NVML_TEMPERATURE_GPU
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        queries: dict[str, Callable[[], float]] = {
            "gpu/utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu/power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu/temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, heat),
            "gpu/throttled": lambda: bool(reasons(handle) & THROTTLED),
        }
        while True:
            for name, query in list(queries.items()):
                try:
                    self.newest = self.newest | {name: float(query())}
                except nvml.NVMLError as error:
                    warnings.warn(f"no {name}: NVML reports: {error}", stacklevel=2)
                    del queries[name]
                    self.newest = self.newest | {name: math.nan}
            if self._stopped.wait(self._every_s):
                return
