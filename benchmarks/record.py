"""What was measured, with all that it depends on, as JSON; and the table that is made from the JSON.

The JSON keeps seconds; the table has ratios alone, because an absolute time tells of the machine that it was taken on.
"""

from __future__ import annotations

import dataclasses
import json
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

from . import ROOT
from .arms import Comparison, Sample, described

PACKAGES = (
    "torch", "lightning", "transformers", "deepspeed", "accelerate", "datasets", "tokenizers", "numpy", "litgpt",
    "torchtitan",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What the command line says to every part.

    Args:
        rounds: Of each comparison.
        quick: Runs every line of a part with little work: for a test. Its figures say nothing.
        models: Names of what `gpu` trains, with commas between them; "": all.
        arms: The same of its arms, and of the checks of `gpu-check`.
        output: The folder of the JSON files.
        load: Of the machine, before the part.
    """

    rounds: int = 7
    quick: bool = False
    models: str = ""
    arms: str = ""
    output: Path = ROOT / "benchmarks" / "results"
    load: float = 0.0


@dataclass(frozen=True)
class Figure:
    """One thing that was measured, and what it should be.

    Args:
        what: In words, without its figure.
        values: One per round; a count or a size has one.
        at_most: Its target, None without a target.
        at_least: The same.
        unit: Empty for a ratio.
        instead: What stands in the place of values: why there are none.
    """

    what: str
    values: list[float]
    at_most: float | None = None
    at_least: float | None = None
    unit: str = ""
    instead: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def held(self) -> bool | None:
        """Whether the median meets the target; None: there is no target."""
        if self.instead or (self.at_most is None and self.at_least is None):
            return None
        return (self.at_most is None or self.median <= self.at_most) and (
            self.at_least is None or self.median >= self.at_least
        )


@dataclass
class Result:
    """Of one part."""

    part: str
    comparisons: list[Comparison] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was left out, and why


def write(result: Result, options: Options) -> Path:
    """<part>.json, in the folder of the options."""
    about = {
        "part": result.part,
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain") else ""),
        "versions": {"python": platform.python_version()} | _versions(),
        "machine": {
            "cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "load": [options.load, os.getloadavg()[0]],
            "threads": os.environ.get("OMP_NUM_THREADS"), "gpu": _gpu(),
        },
    }  # fmt: skip
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{result.part}.json"
    chosen = {"rounds": options.rounds, "quick": options.quick}
    data = about | chosen | dataclasses.asdict(result)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> tuple[dict[str, Any], Result]:
    """What `write` wrote."""
    data = json.loads(path.read_text("utf-8"))
    comparisons = [Comparison(**each) for each in data["comparisons"]]
    for each in comparisons:
        each.samples = {arm: [Sample(**sample) for sample in samples] for arm, samples in each.samples.items()}  # ty: ignore[invalid-argument-type]
    return data, Result(data["part"], comparisons, [Figure(**each) for each in data["figures"]], data["notes"])


def is_old(commit: str, measured: tuple[str, ...]) -> bool:
    """Whether one of the files and folders of the library has changed since, or the commit is not in this history."""
    places = [f"src/dist_template/{place}" for place in measured]
    command = ["git", "-C", str(ROOT), "diff", "--quiet", commit.partition("+")[0], "--", *places]
    return subprocess.run(command, capture_output=True, check=False).returncode != 0


def table(path: Path, measured: tuple[str, ...] = ()) -> str:
    """Markdown; where a file or folder of the library that was `measured` has changed since, nothing in it is held."""
    data, result = read(path)
    old = bool(measured) and is_old(data["commit"], measured)
    machine, versions = data["machine"], data["versions"]
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    lines = [
        f"## {result.part}",
        "",
        f"{data['date']}, commit {data['commit']}, {machine['cpu']}, {machine['cores']} cores{gpu}, "
        f"load {machine['load'][0]:.1f} to {machine['load'][1]:.1f}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "",
        f"    {data['command']}",
        "",
    ]
    if old:
        lines += [f"**Not measured since** a change of {', '.join(measured)} in `src/dist_template`.", ""]
    if result.figures:
        rows = [_row(each, old) for each in result.figures]
        lines += ["| figure | measured | target | |", "|---|---|---|---|", *rows, ""]
    for comparison in result.comparisons:
        lines += [f"{comparison.title}; per {comparison.unit}, as a ratio to `{comparison.reference}`:", ""]
        lines += ["| arm | CPU time | wall time |", "|---|---|---|"]
        for arm in comparison.samples:
            cpu, wall = comparison.cpu_ratios(arm), comparison.wall_ratios(arm)
            lines.append(f"| {arm} | {described(cpu)} | {described(wall)} |")
        lines.append("")
    lines += [f"- {note}" for note in result.notes]
    return "\n".join(lines).rstrip() + "\n"


def _row(figure: Figure, old: bool) -> str:
    bound = f"≤ {figure.at_most:g}" if figure.at_most is not None else ""
    bound += f"≥ {figure.at_least:g}" if figure.at_least is not None else ""
    held = {True: "held", False: "**missed**", None: ""}[figure.held]
    held = "not measured since" if old and held else held
    if figure.instead:
        return f"| {figure.what} | {figure.instead} | {bound} | |"
    digits = 3 if abs(figure.median) < 10 else 0
    return f"| {figure.what} | {described(figure.values, digits)} {figure.unit} | {bound} | {held} |"


def _versions() -> dict[str, str]:
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()
