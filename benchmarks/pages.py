"""python -m benchmarks.pages: results/README.md from the JSON beside it, and the figures of docs/speed.md.

The figures: the slopes in results/growth.json, and the cost model of communication.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch import nn

from . import ROOT
from .__main__ import PARTS
from .arms import Comparison
from .record import read, table
from .traffic import STRATEGIES, Setting, traffic

RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
HEAD = """# Results

Written by `python -m benchmarks.pages` from the JSON files beside it: the newest run of each part, `make bench PART=…`.
A ratio is a median over rounds, with the smallest and the largest; how it is taken stands in `benchmarks/arms.py`, what
is compared and why at the head of each part. The JSON holds the seconds. They are a machine's, and no figure of ours.
Nothing is called held that was measured before a change of what it measures, as `benchmarks/pages.py` says.
"""
LOOP = ("callbacks", "cli/trainer.py", "compat", "model", "observe/loggers", "parallel", "text/batches")
MEASURED = {  # part -> files and folders of src/dist_template; a change of another is taken to leave its figures alone
    "step": LOOP, "dist": LOOP, "model": ("model", "parallel/blocks.py"), "data": ("text",), "chat": ("text",),
    "pipeline": ("parallel", "compat"),
    "checkpoint": ("checkpoint", "callbacks/checkpoint.py"), "startup": ("cli", "callbacks", "compat", "lazy.py"),
    "serving": ("wings/ship/serve",), "growth": LOOP, "gpu": LOOP, "gpu-check": LOOP,
    "zoo": ("model", "parallel"),
}  # fmt: skip
NOT_RUN = {"gpu": "no NVIDIA GPU was to be had; the script is run whole on a CPU, at small sizes, by a test"}
NOT_RUN["gpu-check"] = NOT_RUN["gpu"]
LLAMAS = {  # width, inner, layers, heads, key-value heads, vocabulary
    0.13: (768, 2048, 12, 12, 12, 32000),
    1.1: (2048, 5632, 22, 32, 4, 32000),
    6.7: (4096, 11008, 32, 32, 32, 32000),
    69: (8192, 28672, 80, 64, 8, 32000),
}
RANKS = [2**power for power in range(1, 11)]
TOKENS, NODE = 4096, 8
# tp and cp end at a node; a Llama has no experts
DENSE = [name for name in STRATEGIES if name not in ("tp", "cp") and "ep" not in name]


def main() -> None:
    mpl.use("svg")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "growth", "font.size": 9, "axes.grid": True}
    mpl.rcParams |= {"grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}
    for folder in (FIGURES, RESULTS):
        folder.mkdir(exist_ok=True)
    save(sent(), "traffic")
    if (RESULTS / "growth.json").exists():
        save(slopes(RESULTS / "growth.json"), "growth")
    (RESULTS / "README.md").write_text(readme(), encoding="utf-8")


def readme() -> str:
    """All parts in their order."""
    texts = [HEAD]
    for part, what in PARTS.items():
        path = RESULTS / f"{part}.json"
        why = NOT_RUN.get(part, "not run yet")
        found = path.exists()
        none = f"## {part}\n\n{what[0].upper()}{what[1:]}. No result: {why}.\n"
        texts.append(table(path, MEASURED[part]) if found else none)
    return "\n".join(texts)


def save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None, "Creator": None})


def slopes(path: Path) -> Any:
    """Each sweep's CPU time of a step, as a ratio to its first hand-written one."""
    from matplotlib import pyplot

    comparisons = read(path)[1].comparisons
    figure, panels = pyplot.subplots(2, 3, figsize=(10, 5.6))
    for panel, comparison in zip(panels.flat, comparisons, strict=True):
        title, _, unit = comparison.title.partition(": ")
        for arm in dict.fromkeys(name.rpartition(" ")[0] for name in comparison.samples):
            sizes, middle, low, high = _line(comparison, arm)
            panel.errorbar(sizes, middle, yerr=(low, high), label=arm, marker="o", markersize=3, capsize=2)
        panel.set(title=title, xlabel=unit, ylim=(0, None))
        panel.legend(frameon=False)
    for row in panels:
        row[0].set_ylabel("CPU time of a step,\nfirst one by hand = 1")
    return figure


def _line(comparison: Comparison, arm: str) -> tuple[list[int], list[float], list[float], list[float]]:
    """Sizes; medians over rounds; distances to the smallest and the largest."""
    names = [name for name in comparison.samples if name.rpartition(" ")[0] == arm]
    ratios = [comparison.cpu_ratios(name) for name in names]
    middle = [statistics.median(each) for each in ratios]
    low = [m - min(each) for m, each in zip(middle, ratios, strict=True)]
    high = [max(each) - m for m, each in zip(middle, ratios, strict=True)]
    return [int(name.split()[-1]) for name in names], middle, low, high


def sent() -> Any:
    """Bytes of a rank and step: against ranks at 7 B, against the model's size at 64 ranks."""
    from matplotlib import pyplot

    models = {size: _llama(*shape) for size, shape in LLAMAS.items()}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), sharey="row")
    for name in DENSE:
        left.loglog(RANKS, [_sent(name, models[6.7], ranks) for ranks in RANKS], label=name, marker="o", markersize=3)
        sizes = [_sent(name, model, 64) for model in models.values()]
        right.loglog(list(LLAMAS), sizes, label=name, marker="o", markersize=3)
    left.set(title="Llama of 6.7 B parameters", xlabel="ranks", ylabel="GB sent by a rank in a step")
    right.set(title="64 ranks, nodes of 8", xlabel="parameters, billions")
    left.legend(frameon=False, ncols=2)
    return figure


def _sent(name: str, model: nn.Module, ranks: int) -> float:
    """GB, in bf16-mixed, with one micro-batch of TOKENS tokens a rank and step."""
    return sum(call.sent for call in traffic(name, model, Setting(ranks, TOKENS, node=NODE))) / 1e9


def _llama(width: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary,
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


if __name__ == "__main__":
    main()
