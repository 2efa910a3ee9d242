"""python -m benchmarks [PART …]: measure, write results/<part>.json and results/README.md, print
the part's table."""

import argparse
import importlib
import os
import sys
import warnings
from pathlib import Path

from .record import RESULTS, Options, page, table, write

PARTS = {
    "step": "what a training loop costs per step, on one process",
    "dist": "two processes against the same strategy, hand-written",
    "balance": "work by load: the slowest rank over the mean, a step with a slow rank",
    "checkpoint": "how long saving keeps training waiting",
    "startup": "until help, a refusal, the first step",
    "scale": "a start, a save and a hang of thousands of ranks, which one machine plays",
    "gpu": "model FLOPs utilization, memory; needs an NVIDIA GPU, but for --quick",
}
DEFAULT = ["step", "checkpoint", "startup"]


def main() -> int:
    lines = "\n".join(f"  {name:<12}{what}" for name, what in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"{__doc__}\n\nparts:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--quick", "--smoke", action="store_true", help="run every line, with little work"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument(
        "--models", default="", help="of gpu: parts of their names, with commas; default: all"
    )
    parser.add_argument("--arms", default="", help="of gpu: the same of what it runs; default: all")
    given = parser.parse_args()
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if given.quick and given.output == RESULTS:
        parser.error("--quick measures nothing that may stand in results: give another --output")
    warnings.filterwarnings("ignore")
    for part in given.parts or DEFAULT:
        print(f"{part}: {PARTS[part]}", flush=True)
        options = Options(
            given.rounds, given.quick, given.models, given.arms, given.output, os.getloadavg()[0]
        )
        path = write(importlib.import_module(f"benchmarks.{part}").run(options), options)
        page(given.output, PARTS)
        print(f"\n{table(path)}\nwritten to {path}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
