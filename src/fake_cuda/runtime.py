"""Gives torch's CPU build a `torch.cuda` over the fake device of `rehearse --gpu`, and a NCCL over
gloo.

What torch.cuda calls in torch._C is in device.cpp."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

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


def install(folder: Path, record: Callable[[str, str, str], str]) -> None:
    """Loads the libraries in `folder`, in a process that has preloaded fake_hooks.so, before
    Lightning is imported. `record` gets kind, operation and detail of each event, and returns its
    place."""
    sys.path.append(str(folder))
    device: Any = importlib.import_module("fake_device")
    cuda, distributed, nothing = _runtime(device), (c10d, torch.distributed), lambda *_, **__: None
    for name in dir(device):
        if name.startswith(("_cuda_", "_nccl_")):
            setattr(torch._C, name, getattr(device, name))
    cuda._initialized, cuda._get_device_properties = True, lambda _=None: PROPERTIES
    cuda._exchange_device = cuda._maybe_exchange_device = device._cuda_exchangeDevice
    cuda.device_count = device._cuda_getDeviceCount  # torch's keeps the first answer
    cuda.is_current_stream_capturing, cuda.memory_summary = lambda: False, lambda *_, **__: ""
    cuda.default_generators = tuple(device.default_gen(index) for index in range(16))
    for module in (cuda, cuda.streams):
        module.Event, module.Stream, module.ExternalStream = torch.Event, Stream, Stream
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(cuda.nvtx, name, nothing)
    setattr(torch.backends.cuda, "is_built", lambda: True)  # noqa: B010
    _keep_storages(device)
    for name in ("numpy", "tolist"):  # they read without an operation
        setattr(torch.Tensor, name, _checked(device, name))
    device.check_exactly(_checked_exactly())
    device.set_callback(record)
    of_nccl: Any = importlib.import_module("fake_nccl")
    nccl, init = of_nccl.ProcessGroupNCCL, c10d.init_process_group
    nccl.Options = lambda *_, **__: SimpleNamespace(is_high_priority_stream=False, _timeout=None)
    of_nccl.setup(device.cpu_alias, record)
    replaced: dict[str, Any] = {
        "ProcessGroupNCCL": nccl,
        "is_nccl_available": lambda: True,
        "_NCCL_AVAILABLE": True,
        "_set_pg_timeout": nothing,  # and gloo cannot be bound to a device:
        "init_process_group": lambda *args, device_id=None, **options: init(*args, **options),
    }
    for module in distributed:
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


def _keep_storages(device: Any) -> None:
    """Gives storages of the device what torch has for its own: resizing, copies, loading from
    files."""
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


def _checked(device: Any, name: str) -> Any:
    read = getattr(torch.Tensor, name)
    return lambda self, *args: (device.check_read(self, f"Tensor.{name}"), read(self, *args))[1]


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
