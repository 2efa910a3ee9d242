"""Memory and GPU figures; NVML is replaced by a fake that follows its header."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from dist_template.callbacks import hardware
from tests.support.library import MetricBuffer, environment
from tests.support.runs import logged, only_run, run


class NVMLError(Exception):
    pass


def fake(**wrong: Callable[..., Any]) -> Any:
    """pynvml with one GPU."""

    def handle(uuid: str) -> str:
        assert uuid == "GPU-1234"
        return "the GPU"

    answers: dict[str, Any] = {
        "NVMLError": NVMLError,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": handle,
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=87, memory=30),
        "nvmlDeviceGetPowerUsage": lambda _: 412_500,
        "nvmlDeviceGetTemperature": lambda _, sensor: 61,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0x4,  # the power cap alone
    }
    return SimpleNamespace(**answers | wrong)


def refuse(*_: Any) -> Any:
    raise NVMLError("Not Supported")


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], dict[str, float]]:
    """Returns the figures after the first round of queries."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1234"))

    def first_round(library: Any) -> dict[str, float]:
        monkeypatch.setitem(sys.modules, "pynvml", library)
        sampler = hardware.Sampler(torch.device("cuda", 0), every_s=60.0)
        sampler.stop()
        sampler.thread.join(10)
        assert not sampler.thread.is_alive()
        return sampler.newest

    return first_round


def test_a_gpu_is_queried_by_uuid_and_its_units_are_converted(sample: Callable[[Any], dict[str, float]]) -> None:
    assert sample(fake()) == {
        "gpu/utilization": 0.87, "gpu/power_w": 412.5, "gpu/temperature_c": 61.0, "gpu/throttled": 0.0
    }  # fmt: skip
    hot = fake(nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 0x4 | 0x20)
    assert sample(hot)["gpu/throttled"] == 1.0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_figures_that_a_gpu_does_not_support_are_nan_with_a_warning(sample: Callable[[Any], dict[str, float]]) -> None:
    with pytest.warns(UserWarning, match="no gpu/power_w: .*Not Supported"):
        figures = sample(fake(nvmlDeviceGetPowerUsage=refuse))
    assert [name for name, value in figures.items() if math.isnan(value)] == ["gpu/power_w"]
    with pytest.warns(UserWarning, match="no gpu/. metrics"):
        assert sample(fake(nvmlInit=refuse)) == {}


def test_a_gpu_that_never_answers_blocks_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1234"))
    monkeypatch.setitem(sys.modules, "pynvml", fake(nvmlDeviceGetPowerUsage=lambda _: answers.wait(60) or 0))
    sampler = hardware.Sampler(torch.device("cuda", 0), every_s=60.0)
    assert "gpu/power_w" not in sampler.newest
    sampler.stop()
    assert sampler.thread.is_alive(), "the query still runs: neither reading nor stopping has waited for it"
    answers.set()


def test_ranks_are_reduced_without_unknown_values() -> None:
    nan = float("nan")
    of_ranks = {"memory/peak_share": [0.5, 0.9], "gpu/temperature_c": [70.0, nan], "gpu/power_w": [nan, nan]}
    metrics: dict[str, float] = {}
    buffer = MetricBuffer()
    buffer.of_ranks = of_ranks
    nothing: Any = None
    module: Any = SimpleNamespace(metrics=buffer)
    hardware.Hardware().on_log_step(nothing, module, metrics)
    assert metrics == {"memory/peak_share": 0.9, "gpu/temperature_c": 70.0}


def test_on_a_cpu_memory_is_the_resident_memory(flags: list[str], tmp_path: Path) -> None:
    assert run("fit", *flags, "--trainer.max_steps=2", "--trainer.limit_val_batches=0") == 0
    resident = psutil.Process().memory_info().rss / 2**30
    folder = only_run(tmp_path)
    assert logged(folder, "memory/allocated_gib")[2] == pytest.approx(resident, rel=0.2)
    assert 0 < logged(folder, "memory/peak_share")[2] < 1
    assert not logged(folder, "gpu/power_w")


def test_the_smallest_memory_limit_of_the_host_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control groups, version 2: the job's own group, and the user's slice above it."""
    for folder, limit in (("slice", "2000000"), ("slice/job", "max")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
    monkeypatch.setattr(environment, "CGROUPS", tmp_path)
    read = environment._read
    own = "0::/slice/job\n"
    monkeypatch.setattr(environment, "_read", lambda path: own if str(path) == "/proc/self/cgroup" else read(path))
    assert environment.memory_limit() == 2_000_000
    monkeypatch.setattr(hardware, "memory_limit", environment.memory_limit)
    rss = psutil.Process().memory_info().rss
    assert hardware.Host(2).now()[2] == pytest.approx(2 * rss / 2_000_000, rel=0.2), "two ranks share it"
