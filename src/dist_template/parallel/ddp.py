"""Defaults for Lightning's own DDPStrategy, where they differ from torch's.

    gradient_as_bucket_view    true: gradients are views of the buckets that are sent. This saves a
                               copy and, without accumulation, 4 bytes per parameter
    forward_sync_buffers       false: buffers are not broadcast before each forward pass, as under
                               other strategies. Training must change them equally on all ranks

With many ranks a larger `bucket_cap_mb` than torch's 25 MiB may be faster; Megatron-LM uses 160 MB of fp32.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from ..compat.lightning import set_ddp_defaults

DEFAULTS = {"gradient_as_bucket_view": True, "forward_sync_buffers": False}


def complete(configured: Any, strategy: Any) -> None:
    """Sets `DEFAULTS` if `trainer.strategy` is a name of DDP; a `class_path` keeps torch's."""
    if isinstance(configured, str) and type(strategy) is DDPStrategy:
        set_ddp_defaults(strategy, **DEFAULTS)
