"""A run's folder, read again as one object."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...errors import InputError
from . import goodput
from .metrics import FILE, Metrics, read_lines, read_metrics

INCIDENTS, FACTS, CRASHES = "incidents.jsonl", "facts.json", "crash"
DEFAULTS = "defaults.yaml"

CONFIG = "config.yaml"
OF_A_RUN = (CONFIG, FILE)  # of which a run's folder has one at least


@dataclass
class History:
    """What is known of a run: of a finished one by `read_run`, of one in progress by callbacks/diagnosis.py.

    Args:
        folder: The run's folder.
        config: The configuration, every key resolved.
        defaults: The same keys as nobody has set them; {} where they were not written down.
        facts: What callbacks/record.py wrote at the start: parameters, machine, data, training.
        metrics: By name, over optimizer steps.
        environment: The newest attempt's environment.json.
        incidents: What the numerics guard saw, oldest first.
        goodput: Seconds of each kind, over all attempts.
        crashes: How attempts ended that crashed, one for each rank that could write it down, oldest first.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    environment: dict[str, Any] = field(default_factory=dict)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    goodput: dict[str, float] = field(default_factory=dict)
    crashes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """As people tell runs apart: <run.name>/<id>."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    def key(self, path: str, default: Any = None) -> Any:
        """The configuration's value at "trainer.max_steps"; `init_args` may be left out of the path."""
        return _at(self.config, path, default)

    def fact(self, path: str, default: Any = None) -> Any:
        """facts.json's value at "parameters.active"."""
        return _at(self.facts, path, default)


def read_run(folder: Path, limit: int = 0) -> History:
    """Everything that `folder` has; what is missing is empty.

    Args:
        folder: runs/<name>/<id>.
        limit: Entries kept of a metric, see `Metrics`. 0 keeps all.

    Raises:
        InputError: it is no run's folder.
    """
    if not is_run(folder):
        raise InputError(
            f"{folder} is not the folder of a run: it has neither config.yaml nor {FILE}; give runs/<name>/<id>"
        )
    history = History(
        folder=folder,
        config=_read(folder / "config.yaml", yaml.safe_load),
        defaults=_read(folder / DEFAULTS, yaml.safe_load),
        facts=_read(folder / FACTS, json.loads),
        metrics=read_metrics(folder, limit),
        environment=_read(folder / "environment.json", json.loads),
    )
    look_again(history)
    return history


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in OF_A_RUN)


def look_again(history: History) -> None:
    """Read what may have been added since, but for the metrics: incidents, goodput and crashes."""
    history.incidents = read_incidents(history.folder)
    history.goodput = goodput.read(history.folder)
    crashes = [_read(path, json.loads) for path in (history.folder / CRASHES).glob("*.json")]
    history.crashes = sorted(crashes, key=lambda crash: crash["time"])


def read_incidents(run: Path) -> list[dict[str, Any]]:
    return read_lines(run / INCIDENTS)


def _read(path: Path, parse: Any) -> dict[str, Any]:
    return parse(path.read_text(encoding="utf-8")) or {} if path.exists() else {}


def _at(tree: Any, path: str, default: Any) -> Any:
    for part in path.split("."):
        if isinstance(tree, dict) and part not in tree and "init_args" in tree:
            tree = tree["init_args"]
        if not isinstance(tree, dict) or part not in tree:
            return default
        tree = tree[part]
    return tree


def without_folder(folder: str, value: Any) -> Any:
    """Returns a configuration in which the run's folder is written "{run}", so that another run can use it."""
    if isinstance(value, str):
        return value.replace(folder, "{run}")
    if isinstance(value, list):
        return [without_folder(folder, each) for each in value]
    if isinstance(value, dict):
        return {key: without_folder(folder, each) for key, each in value.items()}
    return value
