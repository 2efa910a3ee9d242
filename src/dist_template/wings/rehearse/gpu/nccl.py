"""Gives torch.distributed an "nccl" backend over gloo, which refuses what NCCL refuses."""

from typing import Any

import fake_device  # ty: ignore[import-not-found]
import fake_nccl  # ty: ignore[import-not-found]
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroupGloo

from .events import EVENTS


class Options:
    """ProcessGroupNCCL.Options."""

    is_high_priority_stream = False

    def __init__(self, *_: Any, **__: Any) -> None:
        self._timeout: Any = None


class _IsBackend(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return type(instance).__name__ == "Backend"


class ProcessGroupNCCL(metaclass=_IsBackend):
    """Makes the C++ group."""

    Options = Options

    def __new__(cls, store: Any, rank: int, size: int, options: Any = None) -> Any:
        of_gloo = ProcessGroupGloo._Options()  # ty: ignore[missing-attribute]
        of_gloo._timeout = options._timeout
        of_gloo._devices = [ProcessGroupGloo.create_default_device()]
        return fake_nccl.make(ProcessGroupGloo(store, rank, size, of_gloo), rank, size)


def _install() -> None:
    replaced: Any = c10d
    modules: list[Any] = [c10d, dist]
    for module in modules:
        module.ProcessGroupNCCL = ProcessGroupNCCL
        module.is_nccl_available = lambda: True
    replaced._NCCL_AVAILABLE = True
    replaced._set_pg_timeout = lambda *_: None
    init = c10d.init_process_group

    def init_process_group(*args: Any, device_id: Any = None, **options: Any) -> None:
        init(*args, **options)  # gloo cannot be bound to a device

    for module in modules:
        module.init_process_group = init_process_group


fake_nccl.setup(fake_device.cpu_alias, EVENTS.record)
_install()
