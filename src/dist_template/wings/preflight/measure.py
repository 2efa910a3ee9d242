"""Measures a rank before the first step: matrix products, copies in memory, all-reduces.

No value is drawn from a global generator, and no process group remains: training is the same with and without.
"""

import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...cluster.watchdog import WATCHDOG
from ...errors import reason
from ...weights import from_all_ranks

# Width and type of the matrices, bytes of each message, seconds of a figure.
CPU = (256, torch.float32, (2**14, 2**18, 2**22), 0.1)
DEVICE = (8192, torch.bfloat16, (2**20, 2**26, 2**30), 2.0)


def measure(device: torch.device, num_nodes: int) -> list[dict[str, Any]]:
    """Returns host, device, figures and perhaps an error of every rank. Collective.

    A rank exchanges with two neighbouring nodes, and the faster counts: a slow node's neighbours are not named."""
    width, dtype, messages, limit_s = CPU if device.type == "cpu" else DEVICE
    own: dict[str, Any] = {"host": platform.node(), "device": device.type}
    buffer = torch.empty(0)
    try:
        if device.type == "cuda":
            own["device"] = torch.cuda.get_device_name(device)
        buffer = torch.zeros(messages[-1] // 4, dtype=torch.float32, device=device)
        half, other = buffer.chunk(2)
        # zeros would need less power than training does
        matrix = torch.randn(width, width, device=device, generator=torch.Generator(device).manual_seed(0)).to(dtype)
        own["matmul"] = _rate(lambda: torch.mm(matrix, matrix), 2 * width**3 / 1e12, limit_s, device)
        own["copy"] = _rate(lambda: half.copy_(other), messages[-1] / 1e9, limit_s / 4, device)
    except Exception as error:  # memory that another process uses, a kernel that the device lacks
        own["error"] = reason(error)
    if dist.is_initialized() and not any("error" in each for each in from_all_ranks(own)):
        rank, world = dist.get_rank(), dist.get_world_size()
        devices = world // num_nodes
        node, local = divmod(rank, devices)
        groups = [("node", range(rank - local, rank - local + devices)), ("world", range(world))]
        for shift in (0, 1) if num_nodes > 1 else ():
            first = node - (node - shift) % 2  # of two nodes
            if 0 <= first < num_nodes - 1:
                groups.append(("pair", range(first * devices + local, (first + 2) * devices, devices)))
        for figure, ranks in groups:
            if len(ranks) > 1:
                own[figure] = max(own.get(figure, 0.0), _bus_gb_s(ranks, buffer, messages, limit_s / 4))
    return [{"rank": rank, **each} for rank, each in enumerate(from_all_ranks(own))]


def _rate(work: Callable[[], object], amount: float, seconds: float, device: torch.device) -> float:
    """Returns the median amount per second of the second half: clocks rise, or fall by heat, in the first."""
    rates, end = list[float](), time.perf_counter() + seconds
    while len(rates) < 4 or time.perf_counter() < end:
        rates.append(amount / _seconds(work, 10, device))
    return median(rates[len(rates) // 2 :])


def _seconds(work: Callable[[], object], times: int, device: torch.device) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        work()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    WATCHDOG.keep_alive()
    return (time.perf_counter() - begun) / times


def _bus_gb_s(ranks: Sequence[int], buffer: Tensor, messages: Sequence[int], limit_s: float) -> float:
    """Returns the best bus bandwidth (as in nccl-tests) of the messages; on a slow network, larger ones are skipped.

    Its own ranks alone create a group, whose name in the store is a hash of their order: descending ranks are not those
    of a group that training creates."""
    group, best = None, 0.0
    if len(ranks) < dist.get_world_size():
        group = dist.new_group([*reversed(ranks)], use_local_synchronization=True, sort_ranks=False)
    for message in messages:
        reduce = partial(dist.all_reduce, buffer[: message // 4], group=group)
        took = [_seconds(reduce, 1, buffer.device) for _ in range(6)][1:]  # the first one connects
        best = max(best, 2 * (1 - 1 / len(ranks)) * message / median(took) / 1e9)
        slowest = torch.tensor(sum(took), device=buffer.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        if slowest > limit_s:
            break
    if group is not None:
        dist.destroy_process_group(group)
    return best
