"""Writes a model card: README.md with the hub's YAML front matter, from what a run recorded."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ....checkpoint.manifest import NAME
from ....observe.history.run import History, read_run
from ....records import flatten, sha256
from .trained import Trained

FIGURES = ("train/loss", "eval/loss", "eval/bits_per_byte", "test/loss", "test/bits_per_byte")
UNKNOWN = "unknown: state it before you share the model"


def write_card(folder: Path, trained: Trained, form: str, verified: str, license: str) -> None:
    """Writes README.md into `folder`, which has the weights.

    `form`: format and type. `verified`: how the folder compares with the trained model. `license`:
    an identifier of the hub, or `unknown`."""
    from huggingface_hub import ModelCardData

    history = read_run(trained.run) if trained.run else History(Path())
    parent = getattr(trained.module, "pretrained", None)
    hub_name = None if parent and Path(parent).exists() else parent
    library = "onnx" if form.startswith("onnx") else "transformers"
    front = ModelCardData(
        license=license, library_name=library, pipeline_tag="text-generation", base_model=hub_name
    )
    model = {
        "architecture": history.fact("model.class"),
        "parameters": history.fact("parameters.total"),
        "parent": parent or "none: trained from scratch",
        "licence": UNKNOWN if license == "unknown" else license,
        "format": f"{form}, exported by dist-template {version('dist-template')}",
        "verified": verified,
    }
    corpus = getattr(trained.data, "corpus", None)
    data = dict(corpus.manifest["splits"]) if corpus else {}
    data |= {k: corpus.manifest["spec"][k] for k in ("source", "tokenizer")} if corpus else {}
    named = NAME.fullmatch(Path(trained.path).name)
    steps, values = int(named[2]) if named else 0, {}
    for name in FIGURES:
        series = history.metrics[name]
        if len(known := series.values[series.steps <= steps]):
            values[name] = f"{known[-1]:.4f}"
    tokens = steps * (history.fact("data.tokens_per_step") or 0)
    files = sorted(path for path in folder.glob("*model*") if path.suffix != ".json")
    results = sorted((trained.run / "evaluation").glob("*.json")) if trained.run else []
    sections = {
        "Model": model,
        "Data": data,
        "Training": {"checkpoint": trained.path, "steps": steps, "tokens": tokens, **values},
        "Evaluation": {path.stem: _evaluated(path) for path in results},
        "SHA-256": {path.name: sha256(path) for path in files},
    }
    text = f"---\n{front.to_yaml()}\n---\n\n# {history.name if trained.run else folder.name}\n"
    for title, rows in sections.items():
        lines = [f"| {name} | {value} |" for name, value in flatten(rows).items() if value]
        text += "\n".join([f"\n## {title}\n", "| | |", "|---|---|", *lines, ""]) if lines else ""
    (folder / "README.md").write_text(text, encoding="utf-8")


def _evaluated(path: Path) -> dict[str, Any]:
    """Returns verdicts, or figures without a baseline. Texts of documents do not leave the run."""
    found = json.loads(path.read_text("utf-8"))
    rows = {key: found[key] for key in ("split", "documents", "contaminated_share")}
    verdicts = {each["name"]: each["sentence"] for each in found["comparisons"]}
    return rows | (verdicts or found["models"][0]["figures"])
