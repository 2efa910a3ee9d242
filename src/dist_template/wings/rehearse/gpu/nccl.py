"""Gives torch.distributed an "nccl" backend over gloo, which refuses what NCCL refuses."""

from typing import Any

import fake_device  # ty: ignore[import-not-found]
import fake_nccl  # ty: ignore[import-not-found]
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from .events import EVENTS


class Options:
    """ProcessGroupNCCL.Options."""

    is_high_priority_stream = False

    def __init__(self, *_: Any, **__: Any) -> None:
        self._timeout: Any = None


def _init_process_group(*args: Any, device_id: Any = None, **options: Any) -> None:
    _INIT(*args, **options)  # gloo cannot be bound to a device


_INIT = c10d.init_process_group
fake_nccl.ProcessGroupNCCL.Options = Options
fake_nccl.setup(fake_device.cpu_alias, EVENTS.record)
for _module in (c10d, dist):
    _replaced: Any = _module
    _replaced.ProcessGroupNCCL, _replaced.init_process_group = fake_nccl.ProcessGroupNCCL, _init_process_group
    _replaced.is_nccl_available, _replaced._NCCL_AVAILABLE = lambda: True, True
    _replaced._set_pg_timeout = lambda *_: None
