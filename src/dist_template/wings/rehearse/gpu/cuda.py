"""Gives torch's CPU build a `torch.cuda` over the fake device; to be imported first.

The process needs LD_PRELOAD=fake_hooks.so; the other libraries are beside it."""

import collections
import functools
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(os.path.dirname(os.environ["LD_PRELOAD"]))

import fake_device  # ty: ignore[import-not-found]
import torch
import torch.cuda.memory
import torch.cuda.random
import torch.cuda.streams
import torchgen

from .events import EVENTS
from .streams import Event, Stream, device, index_of, wait

GB = 2**30
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=80 * GB, major=9, minor=0, multi_processor_count=132,
    warp_size=32, uuid="00000000-0000-0000-0000-000000000000", L2_cache_size=50 << 20,
    max_threads_per_multi_processor=2048, gcnArchName="", is_integrated=0,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472, regs_per_multiprocessor=65536,
)  # fmt: skip


def _num() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _exchange(index: int) -> int:
    before = fake_device.get_device()
    if index >= 0:
        fake_device.set_device(index)
    return before


def _set_device(given: Any) -> None:
    _exchange(index_of(given))


def _memory(_: Any = None) -> dict[str, int]:
    kinds = dict.fromkeys(("allocated_bytes.all.peak", "reserved_bytes.all.peak"), _peak())
    kinds["allocated_bytes.all.current"] = fake_device.allocated()
    return collections.defaultdict(int, kinds)


class _Runtime:
    """torch.cuda.cudart(): page-locks memory that exists."""

    cudaError = SimpleNamespace(success=0)

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        if size <= 0:
            EVENTS.record("HOST_REGISTER_EMPTY", "cudaHostRegister", f"{size} bytes")
            return 1
        fake_device.pin(pointer, size)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        fake_device.unpin(pointer)
        return 0


def _seed(seed: int) -> None:
    fake_device.default_gen(fake_device.get_device()).manual_seed(seed)


def _rng_state(given: Any = "cuda") -> Any:
    return fake_device.default_gen(index_of(given)).get_state()


def _set_rng_state(state: Any, given: Any = "cuda") -> None:
    fake_device.default_gen(index_of(given)).set_state(state)


def _set_rng_states(states: Any) -> None:
    for index, state in enumerate(states):
        _set_rng_state(state, index)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _yes(*_: Any, **__: Any) -> bool:
    return True


_RUNTIME = _Runtime()
_peak = lambda _=None: fake_device.peak()  # noqa: E731
CUDA: dict[str, Any] = {
    "_lazy_init": _nothing, "init": _nothing, "is_initialized": _yes, "is_available": _yes,
    "_is_in_bad_fork": lambda: False, "_is_compiled": _yes, "device_count": _num,
    "current_device": fake_device.get_device, "set_device": _set_device, "device": device,
    "device_of": lambda tensor: device(tensor.device),
    "get_device_properties": lambda _=None: PROPERTIES,
    "get_device_name": lambda _=None: PROPERTIES.name,
    "get_device_capability": lambda _=None: (9, 0), "get_arch_list": lambda: ["sm_90"],
    "is_bf16_supported": _yes, "can_device_access_peer": _yes,
    "is_current_stream_capturing": lambda: False, "memory_stats": _memory,
    "mem_get_info": lambda _=None: (70 * GB, 80 * GB),
    "memory_allocated": lambda _=None: fake_device.allocated(),
    "max_memory_allocated": _peak, "memory_reserved": _peak, "max_memory_reserved": _peak,
    "reset_peak_memory_stats": lambda _=None: fake_device.reset_peak(),
    "memory_summary": lambda *_, **__: "", "empty_cache": _nothing, "ipc_collect": _nothing,
    "check_error": _nothing, "cudart": lambda: _RUNTIME,
    "synchronize": lambda _=None: wait("SYNC", "torch.cuda.synchronize"),
    "Event": Event, "Stream": Stream, "ExternalStream": Stream, "current_stream": Stream,
    "default_stream": Stream, "set_stream": _nothing, "stream": nullcontext,
    "StreamContext": nullcontext,
    "default_generators": [fake_device.default_gen(index) for index in range(16)],
    "get_rng_state": _rng_state, "set_rng_state": _set_rng_state,
    "set_rng_state_all": _set_rng_states,
    "get_rng_state_all": lambda: [_rng_state(index) for index in range(_num())],
    "manual_seed": _seed, "manual_seed_all": _seed, "seed": _nothing, "seed_all": _nothing,
    "initial_seed": lambda: 0,
}  # fmt: skip
ACCELERATOR: dict[str, Any] = {
    "is_available": _yes, "device_count": _num, "empty_cache": _nothing,
    "set_device_index": _set_device, "current_device_index": fake_device.get_device,
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_stream": Stream, "synchronize": CUDA["synchronize"],
}  # fmt: skip
C_NAMES: dict[str, Any] = {  # that the CPU build lacks
    "_cuda_getCurrentRawStream": lambda _: 0, "_cuda_isCurrentStreamCapturing": lambda: False,
    "_cuda_getDeviceCount": _num, "_cuda_getDevice": fake_device.get_device,
    "_cuda_setDevice": fake_device.set_device, "_cuda_exchangeDevice": _exchange,
    "_cuda_maybeExchangeDevice": _exchange, "_nccl_version": lambda: 22903,
    "_nccl_version_suffix": lambda: b"",
}  # fmt: skip


def _install() -> None:
    for name, value in C_NAMES.items():
        if not hasattr(torch._C, name):
            setattr(torch._C, name, value)
    for name, value in CUDA.items():
        setattr(torch.cuda, name, value)
        for module in (torch.cuda.random, torch.cuda.memory, torch.cuda.streams):
            if name in vars(module) and module is not torch.cuda:
                setattr(module, name, value)
    for name, value in ACCELERATOR.items():
        setattr(torch.accelerator, name, value)
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, _nothing)
    replaced: Any = torch
    replaced.backends.cuda.is_built = _yes
    replaced.Tensor.record_stream = _nothing
    replaced.Tensor.is_cuda = property(lambda self: self.device.type == "cuda")
    on_host = torch.UntypedStorage.resize_

    def resize(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return on_host(self, size)
        holder = torch.empty(0, dtype=torch.uint8, device="cuda")
        holder.set_(self)
        fake_device.resize_storage(holder, size)
        return self

    replaced.UntypedStorage.resize_ = resize
    for name in ("numpy", "tolist"):  # they read without an operation
        setattr(torch.Tensor, name, _with_check(name))
    fake_device.check_exactly(_checked_exactly())
    fake_device.set_callback(EVENTS.record)


def _checked_exactly() -> list[str]:
    """Returns the operations whose CUDA wrappers want all tensors on one device, from torch's own list."""
    text = (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text("utf-8")
    functions = [part for part in text.split("\n- func: ")[1:] if "NoCheck" not in part]
    return [f"aten::{part.partition('(')[0]}" for part in functions if "CUDA" in part or "structured" in part]


def _with_check(name: str) -> Any:
    read = getattr(torch.Tensor, name)

    @functools.wraps(read)
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        fake_device.check_read(self, f"Tensor.{name}")
        return read(self, *args, **options)

    return checked


_install()


def events_alive() -> int:
    """Returns how many events of the device exist."""
    return Event.alive
