"""gpu/* is logged on a GPU and waits for no device; what NVML cannot read is one sentence.

This machine needs no GPU: trainings run on the fake devices of `rehearse --gpu`, and NVML answers
at its boundary, from tests/support/nvml.py. No code of ours is replaced."""

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

import fake_cuda
from dist_template.callbacks.gpu import GpuGauges, Names, Sampler, names_of, over_ranks
from dist_template.observe.history.run import read_lines
from dist_template.wings.diagnose.report.curves import figures
from dist_template.wings.history import read_run
from dist_template.wings.rehearse.gpu.devices import run_on_devices
from dist_template.wings.rehearse.record import RunRecord
from tests.support import nvml
from tests.support.line import OURS
from tests.support.parity import MODELS
from tests.support.runs import only_run, run, small
from tests.support.strategies import flags_of

LACKS = pytest.mark.skipif(bool(fake_cuda.refusal()), reason=fake_cuda.refusal())
STEPS = [
    f"--model.architecture={MODELS['llama']}",
    "--trainer.max_steps=12",
    "--trainer.log_every_n_steps=3",
    "--trainer.limit_val_batches=0",
    "--trainer.accelerator=gpu",
    "--trainer.devices=2",
    "--data.micro_batch_size=4",
    "--gpu.every_s=0.1",
]


def waits(record: RunRecord, phase: str) -> int:
    """Without DDP's copies of what gloo has reduced, which NCCL leaves on the device."""
    found = [e for e in record.device.events if (e.phase, e.kind) == (phase, "SYNC")]
    return sum(e.count for e in found if e.inner or e.operation != "H2D blocking copy")


@LACKS
@pytest.mark.slow
def test_gpu_gauges_are_logged_and_wait_for_no_device(
    corpus: Path, cache: Path, tmp_path: Path
) -> None:
    flags = small(corpus, cache, tmp_path)
    assert run("prepare", *flags) == 0
    argv = ["fit", *flags, *STEPS, *flags_of("ddp")]
    record = run_on_devices(2, OURS, argv, tmp_path, prelude=nvml.install).check()
    folder = only_run(tmp_path)
    last = [line for line in read_lines(folder / "metrics.jsonl") if "train/loss" in line][-1]
    assert {name: value for name, value in last.items() if name.startswith("gpu/")} == {
        "gpu/utilization": pytest.approx(0.64),
        "gpu/utilization_min": pytest.approx(0.4),
        "gpu/memory_used_gib": pytest.approx(62),
        "gpu/memory_used_gib_max": pytest.approx(63),
        "gpu/power_w": pytest.approx(449.9),
        "gpu/power_w_max": pytest.approx(612.5),
        "gpu/temperature_c": pytest.approx(67.5),
        "gpu/temperature_c_max": pytest.approx(71),
    }
    drawn = figures([read_run(folder)], ["run"])
    assert [trace["name"] for title, traces in drawn.items() for trace in traces if "GPU" in title]
    assert waits(record, "plain") == 0, record.device.events
    assert waits(record, "log") == 4, "each of four log steps reads its metrics once"


def sampled(monkeypatch: pytest.MonkeyPatch, **other: Any) -> Sampler:
    """A sampler after its first round of readings; `other` are functions that answer otherwise."""
    for name, answer in (nvml.answers() | other).items():
        monkeypatch.setattr(pynvml, name, answer)
    sampler = Sampler(Names([nvml.UUID], ""), every_s=60.0)
    sampler.stop()
    sampler.thread.join(10)
    assert not sampler.thread.is_alive()
    return sampler


def refuse(code: int) -> Any:
    def refused(*_: Any) -> Any:
        raise pynvml.NVMLError(code)

    return refused


def test_units_are_those_of_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampled(monkeypatch).take()
    expected = {"gpu/utilization": 0.88, "gpu/memory_used_gib": 61.0}
    assert found == expected | {"gpu/power_w": 612.5, "gpu/temperature_c": 64.0}


def test_utilization_is_the_mean_since_the_last_log_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power too; of memory and temperature the largest counts. Later the newest sample stands."""
    sampler = sampled(monkeypatch)
    sampler._add("gpu/utilization", 0.0)
    sampler._add("gpu/memory_used_gib", 70.0)
    first, second = sampler.take(), sampler.take()
    assert (first["gpu/utilization"], first["gpu/memory_used_gib"]) == (pytest.approx(0.44), 70.0)
    assert second["gpu/utilization"] == 0.0, "no sample since: the newest"
    sampler._newest = {name: (at - 1e4, value) for name, (at, value) in sampler._newest.items()}
    assert all(map(math.isnan, sampler.take().values())), "a GPU that stopped answering"


def test_a_figure_without_support_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As utilization of a MIG slice. An error that may pass is none."""
    unsupported = refuse(pynvml.NVML_ERROR_NOT_SUPPORTED)
    lost = refuse(pynvml.NVML_ERROR_UNKNOWN)
    sampler = sampled(
        monkeypatch,
        nvmlDeviceGetUtilizationRates=unsupported,
        nvmlDeviceGetPowerUsage=unsupported,
        nvmlDeviceGetTemperature=lost,
    )
    expected = ["NVML does not support gpu/utilization, gpu/power_w on this GPU"]
    assert sampler.new_problems() == expected and sampler.new_problems() == []
    known = {name for name, value in sampler.take().items() if not math.isnan(value)}
    assert known == {"gpu/memory_used_gib"}


def test_a_machine_without_nvml_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = refuse(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    (text,) = sampled(monkeypatch, nvmlInit=missing).new_problems()
    assert text == "no gpu/* metrics: NVML reports: NVML Shared Library Not Found"
    unknown = refuse(pynvml.NVML_ERROR_NOT_FOUND)
    given = {"nvmlDeviceGetHandleByUUID": unknown, "nvmlDeviceGetHandleByPciBusId": unknown}
    (text,) = sampled(monkeypatch, **given).new_problems()
    assert text.startswith("no gpu/* metrics: NVML reports: ")


def test_a_gpu_that_never_answers_blocks_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    hangs = {"nvmlDeviceGetPowerUsage": lambda _: answered.wait(60) and 0}
    for name, answer in (nvml.answers() | hangs).items():
        monkeypatch.setattr(pynvml, name, answer)
    sampler = Sampler(Names([nvml.UUID], ""), every_s=60.0)
    assert math.isnan(sampler.take()["gpu/power_w"])
    sampler.stop()
    assert sampler.thread.is_alive(), "neither reading nor stopping has waited for it"
    answered.set()


def test_a_gpu_is_found_by_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts visible GPUs, NVML all: an index would be another GPU's. A MIG slice is named by
    CUDA_VISIBLE_DEVICES."""
    known = {"uuid": "1234", "pci_domain_id": 0, "pci_bus_id": 0x1B, "pci_device_id": 0}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**known))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    device = torch.device("cuda", 0)
    assert names_of(device) == Names(["GPU-1234", "MIG-1234"], "00000000:1B:00.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-77")
    assert names_of(device).uuids == ["MIG-77", "GPU-1234", "MIG-1234"]


def test_ranks_are_reduced_without_unknown_values() -> None:
    nan = math.nan
    assert over_ranks({"gpu/utilization": [0.5, nan, 0.9], "gpu/power_w": [nan, nan, nan]}) == {
        "gpu/utilization": pytest.approx(0.7),
        "gpu/utilization_min": 0.5,
    }
    assert over_ranks({"gpu/temperature_c": [60.0]}) == {"gpu/temperature_c": 60.0}


def test_on_a_cpu_nothing_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    gauges: Any = GpuGauges()
    module: Any = SimpleNamespace(device=torch.device("cpu"))
    gauges.on_train_start(None, module)
    metrics: dict[str, float] = {}
    gauges.before_log_step(None, module)
    gauges.add_metrics(None, module, metrics)
    gauges.teardown(None, module, "fit")
    assert metrics == {} and capsys.readouterr().out == ""


class Prints:
    """A rank of a Trainer without a console."""

    def __init__(self, rank: int) -> None:
        self.is_global_zero, self.callbacks = rank == 0, []


def test_the_sentence_is_printed_once_by_rank_zero(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = refuse(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    for rank in (0, 1):
        gauges: Any = GpuGauges()
        gauges._sampler = sampled(monkeypatch, nvmlInit=missing)
        gauges._report_problems(Prints(rank))
        gauges.teardown(Prints(rank), None, "fit")
    text = "note: no gpu/* metrics: NVML reports: NVML Shared Library Not Found"
    assert capsys.readouterr().out == f"{text}; training continues without\n"
