"""Writes a model card: README.md with the hub's YAML front matter, from what a run recorded."""

import json
from importlib.metadata import version
from pathlib import Path

from ....metric_names import is_own, parts_of
from ....text.objectives.objective import objective_for
from ...history import History, read_run
from .onnx import EXAMPLE
from .trained import GRAPH, Trained

HELD_OUT, MOST = ("validation", "test"), 20  # of a module's own metrics
FIGURES = ("eval/loss", "eval/bits_per_byte", "test/loss", "test/bits_per_byte")


def write_card(
    folder: Path, trained: Trained, form: str, verified: str, license: str, code: str = EXAMPLE
) -> None:
    """Writes README.md into `folder`. `form`: format and type. `verified`: how the folder compares
    with the trained model. `license`: an identifier of the hub, or `unknown`. `code`: lines that
    run a graph."""
    from huggingface_hub import ModelCardData

    run, title, results = History(Path()), folder.name, list[Path]()
    if trained.run:
        run = read_run(trained.run)
        title, results = run.name, sorted(trained.run.glob("evaluation/*.json"))
    parent = getattr(trained.module, "pretrained", None)
    objective = objective_for(trained.module, trained.data)
    task = None if objective is None else objective.task
    if code is not EXAMPLE:  # of a module that may be for anything
        task = None
    library = "onnx" if (folder / GRAPH).is_file() else "transformers"
    if code is not EXAMPLE and library != "onnx":
        library = "lightning"
    front = ModelCardData(license=license, pipeline_tag=task, library_name=library)
    if parent and not Path(parent).exists():
        front.base_model = parent
    rows = {
        "architecture": run.fact("model.class"),
        "parameters": run.fact("parameters.total"),
        "parent": parent or "none: trained from scratch",
        "licence": license,
        "format": f"{form}, exported by dist-template {version('dist-template')}",
        "verified": verified,
        "checkpoint": trained.path,
    }
    own = [name for name in run.metrics.names if is_own(name) and parts_of(name).stage in HELD_OUT]
    for name in dict.fromkeys([*FIGURES, *own[:MOST]]):
        if len(series := run.metrics[name].finite()):
            rows[f"{name} at the run's end"] = f"{series.last:.4f}"
    for path in results:  # without their documents' texts
        for each in json.loads(path.read_text("utf-8"))["comparisons"]:
            rows[f"{path.stem}: {each['name']}"] = each["sentence"]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)
    text = f"---\n{front.to_yaml()}\n---\n\n# {title}\n\n| | |\n|---|---|\n{table}\n"
    if library == "lightning":
        text += f"\n## By Lightning\n\n```python\n{code}```\n"
    if (folder / GRAPH).is_file():
        text += f"\n## By onnxruntime\n\n```python\n{code}```\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
