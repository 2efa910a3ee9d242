"""python -m benchmarks.experts FOLDER: draws docs/figures/experts.svg from four runs with and without balancing.

The runs are FOLDER/<name>/<id>, with the names below; their commands are in docs/strategies/expert_parallel.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

ROOT = Path(__file__).resolve().parents[1]
MODELS = {"deepseek": "DeepSeek-V3, small: the router's bias", "qwen": "Qwen3-MoE, small: load-balancing loss"}
ARMS = {"off": ("without", "#c44e52"), "on": ("with balancing", "#4c72b0")}
CEILING = 4  # 8 experts, 2 per token
WIDTH = 3  # log steps of a running mean


def main() -> None:
    mpl.use("svg")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "experts", "font.size": 9, "axes.grid": True}
    mpl.rcParams |= {"grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}
    from matplotlib import pyplot as plt

    figure, rows = plt.subplots(2, 2, figsize=(9, 5.5), layout="constrained")
    for (loads, losses), (model, title) in zip(rows, MODELS.items(), strict=True):
        for arm, (label, colour) in ARMS.items():
            run = read(Path(sys.argv[1]) / f"{model}-{arm}")
            draw(loads, run, "moe/expert_load_max_over_mean", label, colour)
            draw(losses, run, "train/loss", label, colour)
        loads.axhline(CEILING, color="black", linewidth=0.8, linestyle="--")
        loads.set(title=title, ylabel="busiest expert over the mean,\nworst layer", ylim=(0.9, 4.1))
        losses.set(ylabel="train/loss, nats per token", xlabel="optimizer step", ylim=(2.2, 5.0))
        losses.legend(frameon=False)
    loads.set_xlabel("optimizer step")
    figure.savefig(ROOT / "docs" / "figures" / "experts.svg", metadata={"Date": None})


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, the newest of each step: a resumed run repeats some."""
    (run,) = folder.iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return list({line["step"]: line for line in lines if "train/loss" in line}.values())


def draw(axes: Any, run: list[dict[str, Any]], name: str, label: str, colour: str) -> None:
    values = [line[name] for line in run]
    means = [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - WIDTH + 1) : i + 1])]
    axes.plot([line["step"] for line in run], means, label=label, color=colour, linewidth=1.2)


if __name__ == "__main__":
    main()
