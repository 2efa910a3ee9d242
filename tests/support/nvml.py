"""Answers of NVML, for machines without a GPU: pynvml's functions return what a driver returns.

They replace the library at its boundary, in pynvml's own C structures and units; nothing of ours is
replaced. Numbers are of `nvidia-smi -q` on an H100."""

import os
from typing import Any

import pynvml

UUID = "GPU-" + "0" * 32  # of the fake device of `rehearse --gpu` (src/fake_cuda/runtime.py)
HANDLES = {UUID: "handle"}
PERCENT = {"0": 88, "1": 40}  # of time with a kernel, by rank
MEMORY = {"0": 61 * 2**30, "1": 63 * 2**30}  # bytes
MILLIWATTS = {"0": 612_500, "1": 287_300}
DEGREES = {"0": 64, "1": 71}


def rank() -> str:
    return os.environ.get("RANK", "0")


def handle_by_uuid(uuid: str) -> str:
    if uuid not in HANDLES:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    return HANDLES[uuid]


def answers() -> dict[str, Any]:
    return {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": handle_by_uuid,
        "nvmlDeviceGetUtilizationRates": lambda _: pynvml.c_nvmlUtilization_t(PERCENT[rank()], 30),
        "nvmlDeviceGetMemoryInfo": lambda _: pynvml.c_nvmlMemory_t(
            80 * 2**30, 80 * 2**30 - MEMORY[rank()], MEMORY[rank()]
        ),
        "nvmlDeviceGetPowerUsage": lambda _: MILLIWATTS[rank()],
        "nvmlDeviceGetTemperature": lambda _, sensor: DEGREES[rank()],
    }


def install() -> None:
    """Gives this process the answers; a prelude of workers."""
    for name, answer in answers().items():
        setattr(pynvml, name, answer)
