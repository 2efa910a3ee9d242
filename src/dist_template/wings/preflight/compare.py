"""Compares the figures of all ranks, and reads the result from a run's folder. Without torch.

`slow` compares while the ranks are measured; `slow_machine` reads what it found for `diagnose`."""

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

from ...records import read_mapping
from ..diagnose.finding import Cause, Finding
from ..history import History

FILE = "preflight.json"
FIGURES = {  # of a rank: unit, what it measures
    "matmul": ("TFLOP/s", "matrix products"),
    "copy": ("GB/s", "copies in memory"),
    "node": ("GB/s", "all-reduces within the node"),
    "world": ("GB/s", "all-reduces of all ranks"),
}


def slow(ranks: list[dict[str, Any]], share: float, num_nodes: int) -> list[str]:
    """Returns a sentence for each figure below `share` of the median of equal devices, for a slow
    network, and for each rank that could not be measured.

    Expected over nodes is 330 GB/s of bus bandwidth on H100, with InfiniBand or EFA
    (NVIDIA/NVSentinel, pull request 837, measured 335 with EFA and 328 with TCPXO). Below 150, a
    cause is worth a search."""
    sentences: list[str] = []
    # Figures of one name on one kind of device, by rank.
    of_devices: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for number, rank in enumerate(ranks):
        for figure in FIGURES.keys() & rank.keys():
            of_devices[figure, rank["device"]][number] = rank[figure]
        if "error" in rank:
            sentences.append(f"rank {number} on {rank['host']} was not measured: {rank['error']}")
    device, world = ranks[0]["device"], ranks[0].get("world", 330.0)
    if "H100" in device and num_nodes > 1 and world < 150:
        sentences.append(
            f"all-reduces of all ranks ({device}) reach {world:.3g} GB/s; expected is 330 GB/s"
        )
    for (figure, device), figures in sorted(of_devices.items()):
        unit, measured = FIGURES[figure]
        middle = median(figures.values())
        for number, value in figures.items():
            if value < share * middle:
                where = f"rank {number} on {ranks[number]['host']} ({device})"
                part = f"{value / middle:.2f} of the median {middle:.3g}"
                sentences.append(f"{where}: {measured} at {value:.3g} {unit}, {part}")
    return sentences


def slow_machine(history: History) -> Iterator[Finding]:
    """Rule of diagnosis: what `preflight` found before the newest attempt's first step."""
    path = history.folder / FILE
    if not path.exists():
        return
    cause = Cause(
        "A GPU is throttled, a link is degraded, or another job runs there: exclude that node."
    )
    title = "a machine was slow before the first step"
    for sentence in read_mapping(path, "remove it")["slow"]:
        yield Finding("slow_machine", "warning", "certain", title, f"{sentence}.", [cause])
