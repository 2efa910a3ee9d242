"""What was measured, with all that it depends on, as JSON; and the tables that are made from the
JSON.

The JSON keeps seconds; a table has ratios alone, because an absolute time is one of the machine.
"""

import dataclasses
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import ROOT
from .arms import Comparison, Sample, described

RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "lightning", "transformers", "deepspeed", "accelerate", "numpy")
HEAD = """# Results

Written by `python -m benchmarks` from the JSON files beside it: the newest run of each part, at the
commit in its head. A ratio is a median over rounds, with the smallest and the largest; how it is
taken is in `benchmarks/arms.py`, what is compared and why at the head of each part. `2026-11.md`
has the last figures of parts that are gone.

"""


@dataclass(frozen=True)
class Options:
    rounds: int = 7
    quick: bool = False  # every line with little work, for a test: its figures say nothing
    models: str = ""  # names of what `gpu` trains, with commas; "": all
    arms: str = ""  # the same of its arms
    output: Path = RESULTS
    load: float = 0.0  # of the machine, before the part


@dataclass(frozen=True)
class Figure:
    """One thing that was measured, and its target."""

    what: str
    values: list[float]  # one per round; a count or a size has one
    at_most: float | None = None
    at_least: float | None = None
    unit: str = ""  # empty for a ratio
    instead: str = ""  # why there are no values
    # one per value, where it is measured against them
    ranks: list[int] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def row(self) -> str:
        bound = f"≤ {self.at_most:g}" if self.at_most is not None else ""
        bound += f"≥ {self.at_least:g}" if self.at_least is not None else ""
        if self.instead:
            return f"| {self.what} | {self.instead} | {bound} | |"
        if self.ranks:
            return f"| {self.what} | {self.growth()} {self.unit} | {bound} | |"
        missed = self.at_most is not None and self.median > self.at_most
        missed = missed or self.at_least is not None and self.median < self.at_least
        held = ("**missed**" if missed else "held") if bound else ""
        digits = 3 if abs(self.median) < 10 else 0
        return f"| {self.what} | {described(self.values, digits)} {self.unit} | {bound} | {held} |"

    def growth(self) -> str:
        """Each value with its number of ranks, and the power of this number by which the last two
        differ."""
        text = "; ".join(
            f"{ranks:,}: {value:.3g}" for ranks, value in zip(self.ranks, self.values, strict=True)
        )
        if len(self.values) < 2 or min(self.values[-2:]) <= 0:
            return text
        power = math.log(self.values[-1] / self.values[-2]) / math.log(
            self.ranks[-1] / self.ranks[-2]
        )
        return f"{text} (N^{power:.1f})"


@dataclass
class Result:
    part: str
    comparisons: list[Comparison] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def put(self, *figures: Figure) -> None:
        """Adds figures in place of earlier ones of the same thing."""
        known = {figure.what for figure in figures}
        self.figures = [*(each for each in self.figures if each.what not in known), *figures]


def write(result: Result, options: Options) -> Path:
    """Writes <part>.json into the folder of the options."""
    about = {
        "part": result.part,
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "commit": commit(),
        "versions": versions(),
        "machine": {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "load": [options.load, os.getloadavg()[0]],
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "gpu": gpu_name(),
        },
        "rounds": options.rounds,
        "quick": options.quick,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{result.part}.json"
    path.write_text(
        json.dumps(about | dataclasses.asdict(result), indent=1) + "\n", encoding="utf-8"
    )
    return path


def read(path: Path) -> tuple[dict[str, Any], Result]:
    """What `write` wrote."""
    data = json.loads(path.read_text("utf-8"))
    for each in data["comparisons"]:
        each["samples"] = {
            arm: [Sample(**sample) for sample in samples]
            for arm, samples in each["samples"].items()
        }
    comparisons = [Comparison(**each) for each in data["comparisons"]]
    return data, Result(
        data["part"], comparisons, [Figure(**each) for each in data["figures"]], data["notes"]
    )


def page(folder: Path, parts: dict[str, str]) -> None:
    """Writes README.md of the folder: the table of each part that has a result, in the order of
    `parts`."""
    found = {part: folder / f"{part}.json" for part in parts}
    texts = [
        table(path) if path.exists() else f"## {part}\n\nNot run yet.\n"
        for part, path in found.items()
    ]
    (folder / "README.md").write_text(HEAD + "\n".join(texts), encoding="utf-8")


def table(path: Path) -> str:
    """Returns Markdown: of each figure and its target, and of each comparison's arms."""
    data, result = read(path)
    machine = data["machine"]
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    lines = [
        f"## {result.part}",
        "",
        f"{data['date']}, commit {data['commit']}, {machine['cpu']}, {machine['cores']}"
        f" cores{gpu}, load {machine['load'][0]:.1f} to {machine['load'][1]:.1f}; "
        + ", ".join(f"{name} {version}" for name, version in data["versions"].items()),
        "",
        f"    {data['command']}",
        "",
    ]
    if result.figures:
        lines += [
            "| figure | measured | target | |",
            "|---|---|---|---|",
            *(each.row() for each in result.figures),
            "",
        ]
    for comparison in result.comparisons:
        lines += [
            f"{comparison.title}; per {comparison.unit}, as a ratio to `{comparison.reference}`:",
            "",
        ]
        lines += ["| arm | CPU time | wall time |", "|---|---|---|"]
        for arm in comparison.samples:
            cpu, wall = (
                described(comparison.cpu_ratios(arm)),
                described(comparison.wall_ratios(arm)),
            )
            lines.append(f"| {arm} | {cpu} | {wall} |")
        lines.append("")
    lines += [f"- {note}" for note in result.notes]
    return "\n".join(lines).rstrip() + "\n"


def gpu_name() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in PACKAGES
    }


def commit() -> str:
    """Returns the short name of the present commit, with "+changes" if files differ from it."""
    return _git("rev-parse", "--short", "HEAD") + (
        "+changes" if _git("status", "--porcelain") else ""
    )


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True
    ).stdout.strip()
