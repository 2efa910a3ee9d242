"""Finds what is to be evaluated, and scores its documents."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ....checkpoint.manifest import agreed
from ....cli.run import check_checkpoint
from ....cluster import subprocess_launcher
from ....errors import Ended, Exit, InputError
from ....observe.history.run import CONFIG
from ....project import Project
from ....records import read_mapping
from ....text.tokenizers import Pretrained
from ..export import trained
from ..export.onnx import MANIFEST
from .documents import DocumentScores


class Model(NamedTuple):
    """A run's configuration with a checkpoint, "start", or the weights of a folder or the hub."""

    name: str
    run: Path
    checkpoint: str = "start"
    folder: str | None = None

    def config(self) -> dict[str, Any]:
        return read_mapping(self.run / CONFIG, "restore it", yaml.safe_load)


def of_run(name: str, project: Project, flag: str) -> Model:
    """Returns the newest checkpoint of a run's folder, or the checkpoint at a path inside one."""
    _, path, run = trained.of_run(name, project, flag)
    check_checkpoint(path, flag)
    return Model(name, run, str(agreed(path)))


def baseline_of(name: str, run: Model, project: Project) -> Model:
    """Returns the model of `--baseline`; `run` has the data of a folder."""
    path, parent = Path(name), run.config()["model"].get("pretrained")
    if name == "parent" and not parent:
        raise InputError(f"--baseline parent: {run.name} was not fine-tuned; give start")
    if name in ("start", "parent"):
        return Model(name, run.run, folder=parent if name == "parent" else None)
    is_on_hub = name.count("/") == 1 and not path.exists() and not path.parent.exists()
    if is_on_hub or (path / "config.json").is_file():
        return Model(name, run.run, folder=name)
    return of_run(name, project, "--baseline")


def score(model: Model, split: str, project: Project, work: Path, data: Any) -> Any:
    """Returns the table of DocumentScores, of `test` or `validate` by the model's own strategy.

    A folder is evaluated in one process, with the run's `data`: their token cache too, if it has
    the same tokenizer.

    Raises:
        Ended: it failed; the reason is on the screen.
    """
    config, path, scores = model.config(), work / CONFIG, work / "scores.parquet"
    trainer, is_onnx = config["trainer"], False
    if model.folder:
        own = Pretrained(model.folder).fit(iter(()))
        if own.backend_tokenizer.to_str() != data.text_tokenizer.backend_tokenizer.to_str():
            keys = {"class_path": "Pretrained", "init_args": {"path": model.folder}}
            config["data"]["tokenizer"] = keys
        is_onnx = (Path(model.folder) / MANIFEST).is_file()
        own_model = {"loss_chunk": None} if is_onnx else {"pretrained": model.folder}
        config["model"] |= {"adapter": None, **own_model}
        trainer |= {"devices": 1, "num_nodes": 1, "strategy": "auto"}
    kind = f"{DocumentScores.__module__}.{DocumentScores.__name__}"
    given = {"path": str(scores), "onnx": model.folder if is_onnx else None}
    callback = {"class_path": kind, "init_args": given}
    trainer |= {"logger": False, "callbacks": [*(trainer["callbacks"] or []), callback]}
    config |= {"ckpt_path": model.checkpoint, "weights_only": None}
    config["run"] = {"root": str(work), "name": "run", "report": False}
    path.write_text(yaml.safe_dump(config), "utf-8")
    print(f"evaluate: {model.name}", flush=True)
    verb = {"validation": "validate"}.get(split, split)
    if code := run_verb(project, [verb, "--config", str(path)]):
        code = Exit(code) if code in [*Exit] else Exit.FAILED
        raise Ended(code, f"evaluate: {model.name} was not evaluated; the reason is above")
    from pandas import read_parquet

    return read_parquet(scores)


def run_verb(project: Project, argv: list[str]) -> int:
    """Runs a verb in a process of its own, which starts the other ranks; returns its exit code."""
    return subprocess_launcher.start([sys.executable, "-m", project.package, *argv]).wait()
