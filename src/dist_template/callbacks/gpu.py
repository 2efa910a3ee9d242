"""Logs utilization, memory, power and temperature of the GPUs, read from NVML in a thread.

NVML is the library of NVIDIA's driver behind `nvidia-smi`. A call takes up to tens of milliseconds,
and never returns for a GPU that has fallen off the bus, so training never makes one itself."""

import math
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch

from ..errors import first_line
from ..model.any_module import metrics_of
from ..ranges import Timeout
from ..records import GIB
from ..run_callback import RunCallback
from .console import console_of

Reduction = Callable[[list[float]], float]

LEAST_S = 0.1  # between two samples: NVML's own utilization covers a sixth of a second or more
OLD = 10  # intervals after which the newest sample no longer counts: the GPU has stopped answering


@dataclass(frozen=True)
class Gauge:
    """How samples of one figure become one number."""

    over_time: Reduction  # over the samples since the last log step
    extreme: Reduction  # over the ranks, beside their mean
    suffix: str  # of the extreme's name


GAUGES = {
    "gpu/utilization": Gauge(statistics.fmean, min, "min"),
    "gpu/memory_used_gib": Gauge(max, max, "max"),
    "gpu/power_w": Gauge(statistics.fmean, max, "max"),
    "gpu/temperature_c": Gauge(max, max, "max"),
}


class GpuGauges(RunCallback):
    """Logs gpu/* at log steps: the mean over all ranks, and with several ranks the extreme.

    A thread of each rank reads the rank's own GPU. It never waits for the device, nor does training
    wait for the thread. Without a GPU there is no thread and no metric.

    Args:
        every_s: Seconds between two readings of a GPU, at least 0.1. 0 turns gpu/* off."""

    def __init__(self, every_s: Timeout = 1.0) -> None:
        self.every_s = every_s
        self._sampler: Sampler | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if pl_module.device.type == "cuda" and self.every_s:
            names = names_of(pl_module.device)
            self._sampler = Sampler(names, max(self.every_s, LEAST_S))

    def before_log_step(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._sampler is None:
            return
        self._report_problems(trainer)
        # Each rank sends every name, also without a value: NaN is "not known".
        for name, value in self._sampler.take().items():
            metrics_of(module).put_of_rank(name, value)

    def add_metrics(
        self, trainer: L.Trainer, module: L.LightningModule, metrics: dict[str, float]
    ) -> None:
        if self._sampler is not None:
            metrics.update(over_ranks(metrics_of(module).of_ranks))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._sampler is not None:
            self._report_problems(trainer)
            self._sampler.stop()
            self._sampler = None

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None

    def _report_problems(self, trainer: L.Trainer) -> None:
        """Prints what the thread could not read, once, on rank 0."""
        assert self._sampler is not None
        for text in self._sampler.new_problems():
            if not trainer.is_global_zero:
                continue
            line = f"note: {text}; training continues without"
            console = console_of(trainer)
            if console:
                console.write(line)
            else:
                print(line, flush=True)


def over_ranks(of_ranks: dict[str, list[float]]) -> dict[str, float]:
    """Returns the metrics of all ranks' figures; a figure that no rank knows is omitted."""
    found = {}
    for name, gauge in GAUGES.items():
        values = of_ranks.get(name, [])
        known = [value for value in values if not math.isnan(value)]
        if known:
            found[name] = statistics.fmean(known)
        if known and len(values) > 1:
            found[f"{name}_{gauge.suffix}"] = gauge.extreme(known)
    return found


@dataclass(frozen=True)
class Names:
    """Names by which NVML may know a GPU, the surest first."""

    uuids: list[str]
    pci_bus_id: str  # "": not known


def names_of(device: torch.device) -> Names:
    """Returns the names of a CUDA device. Its index would be wrong: NVML counts all GPUs of the
    machine, CUDA those that CUDA_VISIBLE_DEVICES lists, in an order of its own.

    A MIG slice has a UUID of its own, which is in CUDA_VISIBLE_DEVICES: a process sees one slice
    at most. torch may know the UUID of its card only."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    uuids = [each.strip() for each in visible if each.strip().startswith("MIG-")][:1]
    found = torch.cuda.get_device_properties(device)  # host data: no device sync
    uuid = str(getattr(found, "uuid", "")).removeprefix("GPU-")
    if uuid:
        uuids += [f"GPU-{uuid}", f"MIG-{uuid}"]
    pci = ""
    if hasattr(found, "pci_bus_id"):
        pci = f"{found.pci_domain_id:08X}:{found.pci_bus_id:02X}:{found.pci_device_id:02X}.0"
    return Names(uuids, pci)


class Sampler:
    """Thread that reads one GPU periodically until `stop`."""

    def __init__(self, names: Names, every_s: float) -> None:
        self._names = names
        self._every_s = every_s
        self._lock = threading.Lock()  # never held during a call of NVML
        self._samples: dict[str, list[float]] = {name: [] for name in GAUGES}  # since `take`
        self._newest: dict[str, tuple[float, float]] = {}  # time and value of the last sample
        self._problems: list[str] = []  # not yet reported
        self._stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="gpu gauges", daemon=True)
        self.thread.start()

    def take(self) -> dict[str, float]:
        """Returns each figure since the last call; without a sample since then the newest one, NaN
        if there is none or it is old."""
        now, found = time.monotonic(), {}
        with self._lock:
            taken, self._samples = self._samples, {name: [] for name in GAUGES}
            newest = dict(self._newest)
        for name, gauge in GAUGES.items():
            at, value = newest.get(name, (-math.inf, math.nan))
            if taken[name]:
                value = gauge.over_time(taken[name])
            elif now - at > OLD * self._every_s:
                value = math.nan
            found[name] = value
        return found

    def new_problems(self) -> list[str]:
        with self._lock:
            problems, self._problems = self._problems, []
        return problems

    def stop(self) -> None:
        """Ends the thread without waiting for it: a call of NVML may never return."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            import pynvml as nvml
        except ImportError:
            self._add_problem("no gpu/* metrics: pip install nvidia-ml-py")
            return
        try:
            nvml.nvmlInit()
            handle = handle_of(nvml, self._names)
            self._sample(nvml, queries(nvml, handle))
        except Exception as error:  # of any kind: it must not print a traceback beside training
            self._add_problem(f"no gpu/* metrics: NVML reports: {first_line(error)}")

    def _sample(self, nvml: Any, figures: dict[str, Callable[[], float]]) -> None:
        while True:
            missing = []
            for name, query in list(figures.items()):
                try:
                    value = float(query())
                except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
                    missing.append(name)
                    del figures[name]
                except nvml.NVMLError:
                    continue  # a GPU that is reset or busy may answer the next time
                else:
                    self._add(name, value)
            if missing:
                self._add_problem(f"NVML does not support {', '.join(missing)} on this GPU")
            if self._stopped.wait(self._every_s):
                return

    def _add(self, name: str, value: float) -> None:
        with self._lock:
            self._samples[name].append(value)
            self._newest[name] = (time.monotonic(), value)

    def _add_problem(self, text: str) -> None:
        with self._lock:
            self._problems.append(text)


def handle_of(nvml: Any, names: Names) -> Any:
    """Returns NVML's handle of a GPU; raises NVMLError if NVML knows it by none of its names."""
    for uuid in names.uuids:
        try:
            return nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError:
            continue
    return nvml.nvmlDeviceGetHandleByPciBusId(names.pci_bus_id)


def queries(nvml: Any, handle: Any) -> dict[str, Callable[[], float]]:
    """Returns a function for each gauge, in the gauge's unit."""
    heat = nvml.NVML_TEMPERATURE_GPU
    return {
        "gpu/utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "gpu/memory_used_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
        "gpu/power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "gpu/temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, heat),
    }
