"""Measures all ranks before the first step, and names those that are slower than the others.

Each rank multiplies matrices and copies memory, then all ranks reduce within their node and over
all nodes; compare.py compares the figures, rank 0 writes and prints them, and all ranks exit or
train. No value is drawn from a global generator, and no process group remains: training is the same
with and without."""

import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor

from ...callbacks.console import only_shows
from ...cluster.watchdog import WATCHDOG
from ...errors import Ended, Exit, reason
from ...processes import from_all_ranks
from ...ranges import Folder, PositiveFloat, Share
from ...records import write_atomically
from .compare import FIGURES, FILE, slow
from .interval import DEVICE_MTBF_H, DISK_GB_S

# Width and type of the matrices, elements of the messages in fp32, seconds of matrix products.
CPU = (256, torch.float32, 2**20, 0.1)
DEVICE = (8192, torch.bfloat16, 2**28, 2.0)


@dataclass(eq=False)
class Preflight(Callback):
    """Multiplies matrices, copies memory and joins all-reduces on every rank, for some seconds, and
    compares.

    Args:
        enabled: null: on several nodes.
        least_share: Of the median; a slower rank is named, with its host, device and figure.
        refuse: Exit with code 78 in place of a warning.
        device_mtbf_h: Hours between two failures of a device, for the best interval of checkpoints.
        disk_gb_s: GB/s with which a node writes a checkpoint, for the same, until a run has
            measured it.
        folder: Where `preflight.json` is written."""

    enabled: bool | None = None
    least_share: Share = 0.8
    refuse: bool = False
    device_mtbf_h: PositiveFloat = DEVICE_MTBF_H
    disk_gb_s: PositiveFloat = DISK_GB_S
    folder: Folder = "{run}"

    @only_shows  # a failed measurement does not end training
    def setup(self, trainer: Any, pl_module: object, stage: str) -> None:
        is_on = self.enabled
        if is_on is None:
            is_on = trainer.num_nodes > 1
        if stage != "fit" or not is_on or trainer.fast_dev_run:
            return
        start, device = time.time(), trainer.strategy.root_device
        ranks = measure(device, trainer.num_nodes)
        if device.type != "cpu":
            torch.accelerator.empty_cache()  # for the weights
        sentences = slow(ranks, self.least_share, trainer.num_nodes)
        if trainer.is_global_zero:
            took_s = time.time() - start
            record = {"time": start, "seconds": took_s, "slow": sentences, "ranks": ranks}
            folder = Path(self.folder)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / FILE, json.dumps(record, indent=1))
            own = ", ".join(_figures(ranks[0]))
            print(f"preflight         {len(ranks)} ranks in {took_s:.1f} s; rank 0: {own}")
            for sentence in sentences:
                print(f"preflight: {sentence}", flush=True)
        if sentences and self.refuse:
            cure = "exclude the node, or set preflight.refuse false"
            raise Ended(Exit.MISMATCH, f"preflight: {'; '.join(sentences)} ({cure})")


def _figures(rank: dict[str, Any]) -> list[str]:
    """Returns a rank's figures in words."""
    words = []
    for name, (unit, _) in FIGURES.items():
        if name in rank:
            words.append(f"{name} {rank[name]:.3g} {unit}")
    return words


def measure(device: torch.device, num_nodes: int) -> list[dict[str, Any]]:
    """Returns host, device, figures and perhaps an error of every rank. Collective."""
    width, dtype, elements, limit_s = CPU if device.type == "cpu" else DEVICE
    own: dict[str, Any] = {"host": platform.node(), "device": device.type}
    buffer = torch.empty(0)
    try:
        if device.type == "cuda":
            own["device"] = torch.cuda.get_device_name(device)
        buffer = torch.zeros(elements, device=device)
        half, other = buffer.chunk(2)
        # Random values, as zeros would need less power than training does; by a generator of
        # their own, so that the global one stays as it is.
        generator = torch.Generator(device).manual_seed(0)
        matrix = torch.randn(width, width, device=device, generator=generator).to(dtype)
        took_s = _seconds(lambda: torch.mm(matrix, matrix), device, limit_s)
        own["matmul"] = 2 * width**3 / 1e12 / took_s  # a product and a sum for each of width^3
        took_s = _seconds(lambda: half.copy_(other), device, limit_s / 4)
        own["copy"] = buffer.nbytes / 1e9 / took_s  # half of it is read, half is written
    except Exception as error:  # memory that another process uses, a kernel that the device lacks
        own["error"] = reason(error)
    # All ranks or none: a rank without its buffer would let the others wait.
    if not any("error" in figures for figures in from_all_ranks(own)):
        own |= _all_reduces(buffer, num_nodes)
    ranks = []
    for number, figures in enumerate(from_all_ranks(own)):
        ranks.append({"rank": number} | figures)
    return ranks


def _all_reduces(buffer: Tensor, num_nodes: int) -> dict[str, float]:
    """Returns the bus bandwidths of all-reduces, in GB/s, as nccl-tests computes them: within a
    node on its first rank, of all ranks on rank 0. Collective."""
    bandwidths: dict[str, float] = {}
    world = dist.get_world_size() if dist.is_initialized() else 1
    # On one node the two sizes are equal, and the dictionary keeps "world" alone.
    for size, figure in {world // num_nodes: "node", world: "world"}.items():
        if size == 1:
            continue
        first, group = dist.get_rank() // size * size, None
        if size < world:
            # The node's ranks alone create a group, whose name in the store is a hash of their
            # order: descending ranks are not those of a group that training creates.
            ranks = list(reversed(range(first, first + size)))
            group = dist.new_group(ranks, use_local_synchronization=True, sort_ranks=False)
        took_s = _seconds(partial(dist.all_reduce, buffer, group=group), buffer.device)
        if dist.get_rank() == first:
            bandwidths[figure] = 2 * (1 - 1 / size) * buffer.nbytes / 1e9 / took_s
        if group is not None:
            dist.destroy_process_group(group)
    return bandwidths


def _seconds(work: Callable[[], object], device: torch.device, limit_s: float = 0.0) -> float:
    """Returns the median of the second half of at least six calls: the first one connects, and
    clocks change."""
    times: list[float] = []
    end = time.perf_counter() + limit_s
    while len(times) < 6 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        WATCHDOG.keep_alive()
        times.append(time.perf_counter() - start)
    return median(times[len(times) // 2 :])
