"""What the machine says of itself: memory of every rank, and an NVIDIA GPU's load, power, heat and clocks."""

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

GIB = 2**30
HOST_EVERY_S = 1.0  # /proc is asked so often at most: 0.1 ms, where a log step of a small model has some milliseconds
# Clocks lowered by the hardware, by heat, or by the board's power supply (nvml.h, nvmlClocksEventReason*). The power
# cap in software is not among them: under large matrix products a healthy GPU runs at it all the time.
HELD_DOWN = 0x8 | 0x20 | 0x40 | 0x80
# metric -> how it is made of all ranks' values
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
    """memory/* and gpu/* over all ranks, at log steps.

    Of a GPU, memory is what torch's allocator had at its highest since the last log step; libraries beside it (NCCL,
    the CUDA context) are not counted. Of a CPU it is what the process has resident, and the larger of two shares: of
    the memory of the host (or control group) that its ranks share, and of the process's own address-space limit; asked
    for once a second at most.

    NVIDIA's library is asked in a thread of its own: an answer takes up to some ten milliseconds, and none comes from a
    GPU that has fallen off the bus.

    Args:
        gpu_every_s: Seconds between two questions to each GPU. 0 asks nothing: no gpu/* then.
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
        if device.type == "cuda":  # all ranks put the same names, or they would not fit together
            values |= dict.fromkeys(GPU, math.nan) | (self._gpu.newest if self._gpu else {})
        for name, value in values.items():
            module.metrics.put_of_rank(name, value)

    def on_log_step(self, trainer: Any, module: Any, metrics: dict[str, float]) -> None:
        for name, join in (MEMORY | GPU).items():
            if known := [v for v in module.metrics.of_ranks.get(name, []) if not math.isnan(v)]:
                metrics[name] = join(known)

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if self._gpu:
            self._gpu.stop()
            self._gpu = None


def of_gpu(device: torch.device) -> tuple[float, float, float]:
    """GiB allocated, GiB reserved, share of the device, each at its highest since the last call. No sync."""
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    reserved = stats["reserved_bytes.all.peak"]
    total = torch.cuda.get_device_properties(device).total_memory
    return stats["allocated_bytes.all.peak"] / GIB, reserved / GIB, reserved / total


class Host:
    """The same of this process, one of so many of this training on the host. Its limits are asked for once."""

    def __init__(self, num_neighbours: int) -> None:
        self._process = psutil.Process()
        self._limit = memory_limit() / num_neighbours
        asked = self._process.rlimit(psutil.RLIMIT_AS)[0] if hasattr(psutil, "RLIMIT_AS") else -1  # Linux
        self._addresses = asked if asked > 0 else math.inf
        self._asked = -math.inf

    def now(self) -> tuple[float, float, float]:
        if time.monotonic() - self._asked >= HOST_EVERY_S:
            self._asked, used = time.monotonic(), self._process.memory_info()
            share = max(used.rss / self._limit, used.vms / self._addresses)
            self._newest = used.rss / GIB, used.rss / GIB, share
        return self._newest


class Sampler:
    """Asks NVIDIA's management library about one GPU, again and again; what it does not tell is not in `newest`."""

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
            # By UUID: numbers differ, since CUDA counts only the visible GPUs, and may order them by speed.
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{self._uuid.removeprefix('GPU-')}")
        except pynvml.NVMLError as error:
            warnings.warn(f"no gpu/* metrics: NVIDIA's management library says: {error}", stacklevel=2)
            return
        figures: dict[str, Callable[[], float]] = {
            "gpu/utilization": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu/power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu/temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "gpu/throttled": lambda: bool(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & HELD_DOWN),
        }
        while True:
            for name, ask in list(figures.items()):
                try:
                    self.newest = self.newest | {name: float(ask())}
                except pynvml.NVMLError as error:
                    warnings.warn(f"no {name}: NVIDIA's management library says: {error}", stacklevel=2)
                    del figures[name]
                    self.newest = {n: value for n, value in self.newest.items() if n != name}
            if self._stopped.wait(self._every_s):
                return
