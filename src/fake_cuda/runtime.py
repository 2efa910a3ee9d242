"""`install`: gives torch's CPU build a `torch.cuda` over the fake device, and a NCCL over gloo.

What torch.cuda calls in torch._C is in device.cpp. The names that are replaced here are torch's
private ones, as of the versions in build.py."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from .build import build
from .event_log import Kind, record_event

Record = Callable[[Kind, str, str], str]  # gets kind, operation and detail, returns the place

GB = 2**30
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    total_memory=80 * GB,
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    L2_cache_size=50 << 20,
    max_threads_per_multi_processor=2048,
    gcnArchName="",
    is_integrated=0,
    uuid="0" * 32,
)


class Stream(torch.Stream):
    """torch.cuda.Stream: torch's own for any device, which asks the fake device's guard."""

    cuda_stream = property(lambda self: self.stream_id)
    is_capturing = staticmethod(lambda: False)


_compiled: dict[str, Any] = {}  # the modules fake_device and fake_nccl, once they are installed


def is_installed() -> bool:
    """Returns whether this process has fake devices."""
    return bool(_compiled)


def install(gpus: int = 1, *, kernels: bool = True, record: Record = record_event) -> None:
    """Gives this process `gpus` devices; compiles them first where they are not in the cache.

    Call it before importing a library that asks torch for GPUs at its import, such as Lightning and
    DeepSpeed. There is no way back; another call sets other arguments, but the autograd threads are
    those of the number of devices at the first backward pass. Raises Unsupported where the device
    cannot work, and ValueError for another number than 1 to 16.

    `kernels`: also report each operation on the device, which takes microseconds each. `record`:
    gets the events in place of `events()`; it is called in the thread of each."""
    if not _compiled:
        folder = build()
        sys.path.append(str(folder))
        for name in ("fake_device", "fake_nccl"):
            _compiled[name] = importlib.import_module(name)
        _replace_cuda(_compiled["fake_device"])
        _replace_storages(_compiled["fake_device"])
        _replace_nccl(_compiled["fake_nccl"])
        _compiled["fake_device"].check_exactly(_checked_exactly())
    device, nccl = _compiled["fake_device"], _compiled["fake_nccl"]
    if gpus not in range(1, device.most_devices + 1):
        raise ValueError(f"gpus is {gpus!r}; 1 to {device.most_devices} are possible")
    device.set_devices(gpus)
    device.start_threads_if_late()
    device.set_reports_kernels(kernels)
    device.set_callback(record)
    nccl.setup(device.cpu_alias, record)


def _replace_cuda(device: Any) -> None:
    """Replaces what torch.cuda takes from CUDA's runtime."""
    for name in dir(device):
        if name.startswith(("_cuda_", "_nccl_")):
            setattr(torch._C, name, getattr(device, name))
    cuda, nothing = _runtime(device), lambda *_, **__: None
    cuda._initialized = True
    cuda._get_device_properties = lambda _=None: PROPERTIES
    cuda._exchange_device = cuda._maybe_exchange_device = device._cuda_exchangeDevice
    cuda.device_count = device._cuda_getDeviceCount  # torch's keeps the first answer
    cuda.is_current_stream_capturing = lambda: False
    cuda.memory_summary = lambda *_, **__: ""
    cuda.default_generators = tuple(map(device.default_gen, range(device.most_devices)))
    for module in (cuda, cuda.streams):
        module.Event, module.Stream, module.ExternalStream = torch.Event, Stream, Stream
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(cuda.nvtx, name, nothing)
    setattr(torch.backends.cuda, "is_built", lambda: True)  # noqa: B010


def _replace_nccl(nccl: Any) -> None:
    """Makes torch.distributed's backend `nccl` the process group of nccl.cpp."""
    group, init = nccl.ProcessGroupNCCL, c10d.init_process_group
    group.Options = lambda *_, **__: SimpleNamespace(is_high_priority_stream=False, _timeout=None)

    def init_process_group(*args: Any, device_id: object = None, **options: Any) -> None:
        init(*args, **options)  # gloo cannot be bound to a device

    replaced: dict[str, Any] = {
        "ProcessGroupNCCL": group,
        "is_nccl_available": lambda: True,
        "_NCCL_AVAILABLE": True,
        "_set_pg_timeout": lambda *_, **__: None,
        "init_process_group": init_process_group,
    }
    for module in (c10d, torch.distributed):
        vars(module).update(replaced)


def _runtime(device: Any) -> Any:
    """Returns torch.cuda, with a runtime that page-locks memory that exists."""
    cuda: Any = torch.cuda
    cuda._cudart = SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaHostUnregister=lambda start: device.pin(start, 0),
        cudaHostRegister=lambda start, size, _: device.pin(start, size) if size else 1,
        cudaMemGetInfo=lambda _: (70 * GB, 80 * GB),
    )
    return cuda


def _replace_storages(device: Any) -> None:
    """Gives storages of the device what torch has for its own: resizing, copies, loading from
    files; and lets reads without an operation be checked."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        device.resize_storage(storage, size)
        return storage

    def clone(storage: Any, to: Any = None) -> Any:
        if to and not to.startswith("cuda"):
            return None
        own = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return own.to(to or storage.device, copy=True).untyped_storage()

    for name, method in (("resize_", resized), ("clone", clone)):
        setattr(torch.UntypedStorage, name, method)
    torch.serialization.register_package(5, lambda _: None, clone)
    for name in ("numpy", "tolist"):
        setattr(torch.Tensor, name, _checked(device, name))


def _checked(device: Any, name: str) -> Any:
    """Returns a method of tensors that reports a read of memory whose copy has not arrived."""
    read = getattr(torch.Tensor, name)

    def checked(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        device.check_read(self, f"Tensor.{name}")
        return read(self, *args, **options)

    return checked


def _checked_exactly() -> list[str]:
    """Returns the operations whose CUDA wrappers want all tensors on one device, from torch's own
    list."""
    functions = (
        Path(torch.__file__).parents[1] / "torchgen/packaged/ATen/native/native_functions.yaml"
    )
    parts = [
        part
        for part in functions.read_text("utf-8").split("\n- func: ")[1:]
        if "NoCheck" not in part
    ]
    return [
        f"aten::{part.partition('(')[0]}"
        for part in parts
        if "CUDA" in part or "structured" in part
    ]
