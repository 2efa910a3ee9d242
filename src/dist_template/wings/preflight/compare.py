"""Compares the figures of all ranks, and reads the result from a run's folder. Without torch."""

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

from ...records import read_mapping
from ..diagnose.finding import Cause, Finding
from ..history import History

FILE = "preflight.json"
FIGURES = {  # of a rank: unit, what it measures; `world` is one figure of all
    "matmul": ("TFLOP/s", "matrix products"),
    "copy": ("GB/s", "copies in memory"),
    "node": ("GB/s", "all-reduces within the node"),
    "pair": ("GB/s", "all-reduces with a neighbouring node"),
    "world": ("GB/s", "all-reduces of all ranks"),
}


def slow(ranks: list[dict[str, Any]], share: float, num_nodes: int) -> list[str]:
    """Returns a sentence for each host with a figure below `share` of the median of equal devices, for a slow network,
    and for each rank that could not be measured.

    Expected over nodes is 330 GB/s of bus bandwidth on H100, with InfiniBand or EFA (NVIDIA/NVSentinel, pull request
    837, measured 335 with EFA and 328 with TCPXO). Below 150, a cause is worth a search."""
    found, of_devices = [], defaultdict(dict)
    for rank in ranks:
        for figure in FIGURES.keys() & rank.keys():
            of_devices[figure, rank["device"]][rank["rank"]] = rank[figure]
        if "error" in rank:
            found.append(f"rank {rank['rank']} on {rank['host']} was not measured: {rank['error']}")
    for (figure, device), figures in sorted(of_devices.items()):
        (unit, what), middle, of_hosts = FIGURES[figure], median(figures.values()), defaultdict(list)
        if figure == "world" and "H100" in device and num_nodes > 1 and middle < 150:
            found.append(f"{what} ({device}) reach {middle:.3g} {unit}; expected is 330 {unit}")
        for rank, value in figures.items():
            if figure != "world" and value < share * middle:
                of_hosts[ranks[rank]["host"]].append(rank)
        for host, below in of_hosts.items():
            least = min(map(figures.get, below))
            it = f"{what} at {least:.3g} {unit}, {least / middle:.2f} of the median {middle:.3g}"
            found.append(f"rank {', '.join(map(str, below))} on {host} ({device}): {it}")
    return found


def slow_machine(history: History) -> Iterator[Finding]:
    """Rule of diagnosis: what `preflight` found before the newest attempt's first step."""
    path = history.folder / FILE
    for sentence in read_mapping(path, "remove it")["slow"] if path.exists() else ():
        cause = Cause("A GPU is throttled, a link is degraded, or another job runs there: exclude that node.")
        title = "a machine was slow before the first step"
        yield Finding("slow_machine", "warning", "certain", title, f"{sentence}.", [cause])
