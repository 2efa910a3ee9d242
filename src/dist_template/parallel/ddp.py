"""DDP is Lightning's own strategy; these options differ from torch's defaults when it is configured by name.

    gradient_as_bucket_view    true: gradients lie in the buckets that are sent; without accumulation 4 bytes a
                               parameter less, and in any case the copy back
    forward_sync_buffers       false: all ranks start with rank 0's, and no other strategy sends them before a forward;
                               what changes a buffer in training must change it on every rank alike

Left alone: `static_graph`, which spares a walk through the graph that is not taken without `find_unused_parameters`,
and is wrong where an edited module's graph differs between steps; `bucket_cap_mb`, 25 MiB, which many ranks may want
larger, because each sends a rank's share of it at a time: Megatron takes 160 MB of fp32, and 4 MB a rank beyond 40
(`DistributedDataParallelConfig.bucket_size`).
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from ..compat.lightning import set_ddp_defaults

DEFAULTS = {"gradient_as_bucket_view": True, "forward_sync_buffers": False}


def complete(configured: Any, strategy: Any) -> None:
    """Sets `DEFAULTS` where `trainer.strategy` names DDP or chose it; a `class_path` takes torch's own defaults."""
    if isinstance(configured, str) and type(strategy) is DDPStrategy:
        set_ddp_defaults(strategy, **DEFAULTS)
