"""Finds the models that are to be evaluated, and scores their documents."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from ....checkpoint.commit import agreed
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

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedTokenizerFast


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
    """Returns the model of `--baseline`; a folder is evaluated on the data of `run`."""
    if name == "start" or trained.is_pretrained(name):
        return Model(name, run.run, folder=None if name == "start" else name)
    if name == "parent":
        parent = run.config()["model"].get("pretrained")
        if not parent:
            raise InputError(f"--baseline parent: {run.name} was not fine-tuned; give start")
        return Model(name, run.run, folder=parent)
    return of_run(name, project, "--baseline")


def score(
    model: Model, split: str, project: Project, work: Path, tokenizer: PreTrainedTokenizerFast
) -> DataFrame:
    """Returns the table of DocumentScores, of `test` or `validate` by the model's own strategy.

    A folder is evaluated in one process, with the run's token cache if it has its `tokenizer`.

    Raises:
        Ended: it failed; the reason is on the screen.
    """
    config, path, scores = model.config(), work / CONFIG, work / "scores.parquet"
    trainer, onnx = config["trainer"], None
    if model.folder:
        found = Pretrained(model.folder).fit(iter(()))
        if found.backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str():
            of_folder = {"class_path": "Pretrained", "init_args": {"path": model.folder}}
            config["data"]["tokenizer"] = of_folder
        config["model"]["adapter"] = None
        if (Path(model.folder) / MANIFEST).is_file():
            onnx, config["model"]["loss_chunk"] = model.folder, None
        else:
            config["model"]["pretrained"] = model.folder
        trainer |= {"devices": 1, "num_nodes": 1, "strategy": "auto"}
    kind = f"{DocumentScores.__module__}.{DocumentScores.__name__}"
    callback = {"class_path": kind, "init_args": {"path": str(scores), "onnx": onnx}}
    trainer |= {"logger": False, "callbacks": [*(trainer["callbacks"] or []), callback]}
    config |= {"ckpt_path": model.checkpoint, "weights_only": None}
    config["run"] = {"root": str(work), "name": "run", "report": False}
    path.write_text(yaml.safe_dump(config), "utf-8")
    print(f"evaluate: {model.name}", flush=True)
    verb = "validate" if split == "validation" else "test"
    if code := run_verb(project, [verb, "--config", str(path)]):
        why = f"evaluate: {model.name} was not evaluated; the reason is above"
        raise Ended(Exit(code) if code in [*Exit] else Exit.FAILED, why)
    from pandas import read_parquet

    return read_parquet(scores)


def run_verb(project: Project, argv: list[str]) -> int:
    """Runs a verb in a process of its own, which starts the other ranks; returns its exit code."""
    return subprocess_launcher.start([sys.executable, "-m", project.package, *argv]).wait()
