"""Evaluates modules that know no text: Lightning's own validation or test, with a run's checkpoint.

The verb `test` or `validate` runs in processes of its own, by the run's configuration and strategy,
for the run and then for the baseline (`metrics_of`); a callback writes what was logged (Metrics).

A module's metrics have no values per document, so that two models are compared without a test of
significance: the difference is printed, and what it means is for the reader to judge."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import lightning as L
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

from ....cli.fit import WithoutTrainer
from ....errors import Ended, Exit, InputError
from ....model.any_module import results_of
from ....observe.history.run import RunFile
from ....project import Project, program
from ....records import read_mapping, write_atomically
from ..export import trained
from .models import Model, find, run_verb

VERBS = {"test": "test", "validation": "validate"}
STEPS = {"test": "test_step", "validation": "validation_step"}
LOADERS = {"test": "test_dataloader", "validation": "val_dataloader"}


class Metrics(Callback):
    """Writes what a module's validation or test has logged.

    Args:
        path: The JSON file to write: {metric: value}."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            text = json.dumps(results_of(trainer, pl_module))  # with Python's NaN and Infinity
            write_atomically(Path(self.path), text)

    on_validation_end = on_test_end


def is_for_texts(cli: WithoutTrainer) -> bool:
    """Returns whether module and data are of texts, which documents.py scores."""
    return hasattr(cli.datamodule, "documents") and hasattr(cli.model, "sums")


def evaluate(
    given: argparse.Namespace, split: str, name: str, cli: WithoutTrainer, project: Project
) -> None:
    """Writes <name>.json with the metrics of each model. Raises InputError if the module or its
    data have nothing to evaluate, or a flag is for texts alone."""
    of_texts = {"--tasks": given.tasks, "--require": given.require}
    for flag, value in of_texts.items():
        if value:
            raise InputError(
                f"{flag} is for language models, which are compared by their documents:"
                f" {type(cli.model).__name__} with {type(cli.datamodule).__name__} is not one;"
                " remove it, and read the metrics of the .json file"
            )
    run = find(given.run, project)
    models = [run]
    if given.baseline:
        if given.baseline != "start" and trained.is_pretrained(given.baseline):
            raise InputError(
                f"--baseline {given.baseline!r}: a folder or a model of the hub is for language"
                " models; give a run, a checkpoint in one, or start"
            )
        models.append(find(given.baseline, project, run.run))
    folder = run.run / "evaluation"
    work = folder / f".{name}"
    work.mkdir(parents=True, exist_ok=True)
    try:
        figures = [metrics_of(model, split, project, work) for model in models]
    finally:
        shutil.rmtree(work)
    write(folder / f"{name}.json", split, models, figures)


def split_of(given: str | None, cli: WithoutTrainer) -> str:
    """Returns the split to evaluate: the given one, else the first of test and validation that
    module and data have. Raises InputError if they do not have it."""
    module, data = cli.model, cli.datamodule

    def lacks(split: str) -> str:
        """Returns what is missing for a split; "" if nothing is."""
        if not is_overridden(STEPS[split], module, L.LightningModule):
            return f"{type(module).__name__} has no {STEPS[split]}"
        if is_overridden(LOADERS[split], module, L.LightningModule):
            return ""
        if data is None:
            return f"{type(module).__name__} has no {LOADERS[split]}"
        if is_overridden(LOADERS[split], data, L.LightningDataModule):
            return ""
        return f"{type(data).__name__} has no {LOADERS[split]}"

    where, splits = "evaluate", list(STEPS)
    if given:
        where, splits = f"--split {given}", [given]
    missing = []
    for split in splits:
        lacking = lacks(split)
        if not lacking:
            return split
        missing.append(lacking)
    raise InputError(f"{where}: {' and '.join(missing)}; write it, or evaluate another")


def metrics_of(model: Model, split: str, project: Project, work: Path) -> dict[str, float]:
    """Returns the metrics of `test` or `validate` by the model's own strategy. Raises Ended if it
    fails."""
    config = read_mapping(model.run / RunFile.CONFIG, "restore it", yaml.safe_load)
    path, found = work / RunFile.CONFIG, work / "metrics.json"
    found.unlink(missing_ok=True)
    trainer = config["trainer"]
    # jsonargparse takes one callback, a list, or none.
    callbacks = trainer.get("callbacks")
    if not callbacks:
        callbacks = []
    if not isinstance(callbacks, list):
        callbacks = [callbacks]
    kind = f"{Metrics.__module__}.{Metrics.__name__}"
    callback = {"class_path": kind, "init_args": {"path": str(found)}}
    trainer["callbacks"] = [*callbacks, callback]
    trainer["logger"] = False
    config |= {"ckpt_path": model.checkpoint, "weights_only": None}
    config["run"] = {"root": str(work), "name": "run", "report": False}
    path.write_text(yaml.safe_dump(config), "utf-8")
    print(f"evaluate: {model.name}", flush=True)
    code = run_verb(project, [VERBS[split], "--config", str(path)])
    if code:
        # A signal ends a process with another code.
        kind_of_exit = Exit(code) if code in list(Exit) else Exit.FAILED
        why = f"evaluate: {model.name} was not evaluated; the reason is above"
        raise Ended(kind_of_exit, why)
    if not found.exists():
        raise InputError(f"{model.name}: the {split} loader has no batch; give the split rows")
    return json.loads(found.read_text("utf-8"))


@dataclass(frozen=True)
class Difference:
    """A metric of the run and of the baseline."""

    name: str
    run: float
    baseline: float

    @property
    def sentence(self) -> str:
        change = self.run - self.baseline
        return (
            f"{self.name}: {self.run:.4g}, against {self.baseline:.4g} of the baseline"
            f" ({change:+.4g})"
        )


def write(path: Path, split: str, models: list[Model], figures: list[dict[str, float]]) -> None:
    """Writes and prints the metrics of all models, and the differences of those that all have."""
    found = []
    for number, (model, values) in enumerate(zip(models, figures, strict=True)):
        entry = {"model": model.name, "figures": values, "is_baseline": number > 0}
        found.append(entry)
        shown = f"{STEPS[split]} logs no metric"
        if values:
            shown = "  ".join(f"{key} {value:.4g}" for key, value in values.items())
        print(f"{model.name}: {shown}")
    comparisons = []
    if len(figures) > 1:
        ours, theirs = figures
        for name, value in ours.items():
            if name in theirs:
                each = Difference(name, value, theirs[name])
                comparisons.append(asdict(each) | {"sentence": each.sentence})
    content = {"split": split, "models": found, "comparisons": comparisons}
    write_atomically(path, json.dumps(content, indent=1))
    for each in comparisons:
        print(each["sentence"])
    more = f"; {program('evaluate')} RUN --baseline start compares" if len(models) < 2 else ""
    print(f"written to {path}{more}")
