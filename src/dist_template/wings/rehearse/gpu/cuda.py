"""Gives torch's CPU build a `torch.cuda` over the fake device, and torch.distributed a NCCL over gloo; to be imported
first, with LD_PRELOAD=fake_hooks.so. What torch.cuda calls in torch._C is in device.cpp."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(os.path.dirname(os.environ["LD_PRELOAD"]))

import fake_device  # ty: ignore[import-not-found]
import torch
import torch.distributed.distributed_c10d as c10d
import torchgen

from .events import EVENTS

GB = 2**30
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=80 * GB, major=9, minor=0, multi_processor_count=132, warp_size=32,
    L2_cache_size=50 << 20, max_threads_per_multi_processor=2048, gcnArchName="", is_integrated=0, uuid="0" * 32,
)  # fmt: skip


class Stream(torch.Stream):
    """torch.cuda.Stream: torch's own for any device, which asks the fake device's guard."""

    cuda_stream = property(lambda self: self.stream_id)
    is_capturing = staticmethod(lambda: False)


class _Runtime:
    """torch.cuda.cudart(): page-locks memory that exists."""

    cudaError = SimpleNamespace(success=0)
    cudaHostUnregister = staticmethod(lambda start: fake_device.pin(start, 0))
    cudaHostRegister = staticmethod(lambda start, size, _: fake_device.pin(start, size) if size else 1)
    cudaMemGetInfo = staticmethod(lambda _: (70 * GB, 80 * GB))


def _checked_exactly() -> list[str]:
    """Returns the operations whose CUDA wrappers want all tensors on one device, from torch's own list."""
    text = (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text("utf-8")
    functions = [part for part in text.split("\n- func: ")[1:] if "NoCheck" not in part]
    return [f"aten::{part.partition('(')[0]}" for part in functions if "CUDA" in part or "structured" in part]


def _with_check(name: str) -> Any:
    read = getattr(torch.Tensor, name)
    return lambda self, *args: (fake_device.check_read(self, f"Tensor.{name}"), read(self, *args))[1]


def _resize(storage: Any, size: int) -> Any:
    if storage.device.type != "cuda":
        return _RESIZE(storage, size)
    fake_device.resize_storage(storage, size)
    return storage


def _clone(storage: Any, to: Any = None) -> Any:
    bytes_ = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return bytes_.to(to or storage.device, copy=True).untyped_storage()


def _nothing(*_: Any, **__: Any) -> None:
    pass


_RESIZE, _INIT = torch.UntypedStorage.resize_, c10d.init_process_group


def _install() -> None:
    import fake_nccl  # ty: ignore[import-not-found]  (whose base is a class of torch.distributed)

    for name in dir(fake_device):
        if name.startswith(("_cuda_", "_nccl_")):
            setattr(torch._C, name, getattr(fake_device, name))
    cuda: Any = torch.cuda
    cuda._initialized, cuda._cudart = True, _Runtime
    cuda._exchange_device = cuda._maybe_exchange_device = fake_device._cuda_exchangeDevice
    cuda._get_device_properties = lambda _=None: PROPERTIES
    cuda.device_count = fake_device._cuda_getDeviceCount  # torch's keeps the first answer
    cuda.is_current_stream_capturing, cuda.memory_summary = lambda: False, lambda *_, **__: ""
    cuda.default_generators = tuple(fake_device.default_gen(index) for index in range(16))
    for module in (cuda, cuda.streams):
        module.Event, module.Stream, module.ExternalStream = torch.Event, Stream, Stream
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(cuda.nvtx, name, _nothing)
    setattr(torch.backends.cuda, "is_built", lambda: True)  # noqa: B010
    restored = lambda storage, to: _clone(storage, to) if to.startswith("cuda") else None  # noqa: E731
    torch.serialization.register_package(5, _nothing, restored)
    for name, method in (("resize_", _resize), ("clone", _clone)):
        setattr(torch.UntypedStorage, name, method)
    for name in ("numpy", "tolist"):  # they read without an operation
        setattr(torch.Tensor, name, _with_check(name))
    fake_device.check_exactly(_checked_exactly())
    fake_device.set_callback(EVENTS.record)
    nccl = fake_nccl.ProcessGroupNCCL
    nccl.Options = lambda *_, **__: SimpleNamespace(is_high_priority_stream=False, _timeout=None)
    fake_nccl.setup(fake_device.cpu_alias, EVENTS.record)
    places: Any = (c10d, torch.distributed)
    for place in places:
        place.ProcessGroupNCCL = nccl  # over gloo, which cannot be bound to a device
        place.init_process_group = lambda *args, device_id=None, **options: _INIT(*args, **options)
        place.is_nccl_available, place._NCCL_AVAILABLE = lambda: True, True
        place._set_pg_timeout = _nothing


_install()
