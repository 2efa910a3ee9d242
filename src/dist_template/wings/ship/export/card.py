"""Writes a model card: README.md with the hub's YAML front matter, from what a run recorded."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

from ....checkpoint.manifest import SavedCheckpoint
from ....observe.history.run import History, read_run
from ....records import flatten, sha256
from .trained import Trained

FIGURES = ("train/loss", "eval/loss", "eval/bits_per_byte", "test/loss", "test/bits_per_byte")


def write_card(folder: Path, trained: Trained, form: str, verified: str, license: str) -> None:
    """Writes README.md into `folder`, which has the weights.

    `form`: format and type. `verified`: how the folder compares with the trained model. `license`:
    an identifier of the hub, or `unknown`."""
    from huggingface_hub import ModelCardData

    run, title, results = History(Path()), folder.name, list[Path]()
    if trained.run:
        run = read_run(trained.run)
        title, results = run.name, sorted(trained.run.glob("evaluation/*.json"))
    parent = getattr(trained.module, "pretrained", None)
    front = ModelCardData(license=license, pipeline_tag="text-generation")
    front.library_name = "onnx" if form.startswith("onnx") else "transformers"
    if parent and not Path(parent).exists():
        front.base_model = parent
    if license == "unknown":
        license = "unknown: state it before you share the model"
    model = {
        "architecture": run.fact("model.class"),
        "parameters": run.fact("parameters.total"),
        "parent": parent or "none: trained from scratch",
        "licence": license,
        "format": f"{form}, exported by dist-template {version('dist-template')}",
        "verified": verified,
    }
    text = f"---\n{front.to_yaml()}\n---\n\n# {title}\n{_section('Model', model)}"
    if corpus := getattr(trained.data, "corpus", None):
        spec = corpus.manifest["spec"]
        data = corpus.manifest["splits"] | {"source": spec["source"]}
        text += _section("Data", data | {"tokenizer": spec["tokenizer"]})
    steps, checkpoint = 0, Path(trained.path)
    for saved in SavedCheckpoint.all_in(checkpoint.parent):
        if saved.path == checkpoint:
            steps = saved.step
    training: dict[str, object] = {"checkpoint": trained.path, "steps": steps}
    training["tokens"] = steps * (run.fact("data.tokens_per_step") or 0)
    for name in FIGURES:
        series = run.metrics[name]
        values = series.values[series.steps <= steps]
        if len(values):
            training[name] = f"{values[-1]:.4f}"
    text += _section("Training", training)
    # Texts of documents stay in the run.
    evaluation: dict[str, object] = {}
    for path in results:
        result = json.loads(path.read_text("utf-8"))
        for key in ("split", "documents"):
            evaluation[f"{path.stem}.{key}"] = result[key]
        for each in result["comparisons"]:
            evaluation[f"{path.stem}.{each['name']}"] = each["sentence"]
        if not result["comparisons"]:
            evaluation[path.stem] = result["models"][0]["figures"]
    text += _section("Evaluation", evaluation)
    digests = {}
    for path in sorted(folder.glob("*model*")):
        if path.suffix != ".json":
            digests[path.name] = sha256(path)
    (folder / "README.md").write_text(text + _section("SHA-256", digests), encoding="utf-8")


def _section(title: str, rows: dict) -> str:
    lines = [f"| {name} | {value} |" for name, value in flatten(rows).items() if value]
    return "\n".join([f"\n## {title}\n", "| | |", "|---|---|", *lines, ""]) if lines else ""
