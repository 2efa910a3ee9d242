"""Reads a run's folder into one object."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ...errors import InputError
from ...records import flatten, read_mapping
from . import goodput
from .metrics import FILE, Metrics, is_number, read_lines, read_metrics

__all__ = ["CONFIG", "History", "last_write", "read_run"]

INCIDENTS, FACTS, CRASHES = "incidents.jsonl", "facts.json", "crash"
DEFAULTS, ENVIRONMENT = "defaults.yaml", "environment.json"
CONFIG = "config.yaml"
PlotlyJs = Literal["shared", "inline", "cdn"]  # run.plotly: where a report loads plotly.js from
Tree = dict[str, Any]  # the content of a JSON or YAML file


@dataclass
class History:
    """Records of a run; `read_run` reads them, wings/diagnose/callback.py adds to them.

    `metrics` are by name, over optimizer steps; `environment` is the newest attempt's; `goodput` has the seconds of
    each kind over all attempts; `incidents` and `crashes` are in the order of time.
    """

    folder: Path
    config: Tree = field(default_factory=dict)
    defaults: Tree = field(default_factory=dict)
    facts: Tree = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    environment: Tree = field(default_factory=dict)
    incidents: list[Tree] = field(default_factory=list)
    goodput: dict[str, float] = field(default_factory=dict)
    crashes: list[Tree] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Returns <run.name>/<id>."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def missing(self) -> list[str]:
        """Names of the files that rules need most and that the run's folder lacks."""
        return [name for name in (FILE, FACTS) if not (self.folder / name).exists()]

    @property
    def productive_share(self) -> float | None:
        """The productive share of the wall time; None if it was not recorded."""
        return goodput.share(self.goodput) if self.goodput else None

    def attempts(self) -> list[Tree]:
        """Returns the lines of goodput.jsonl; each has the time at which its attempt started."""
        return goodput.read_attempts(self.folder)

    def key(self, path: str, default: object = None) -> Any:
        """Returns the configuration's value at a path such as "trainer.max_steps".

        `init_args` may be omitted in the path.
        """
        return _at(self.config, path, default)

    def fact(self, path: str, default: object = None) -> Any:
        """Returns the value of facts.json at a path such as "parameters.active"."""
        return _at(self.facts, path, default)

    def portable_config(self) -> Tree:
        """Returns the flat configuration, with "{run}" for the run's own folder, as users write it."""
        root, name = self.key("run.root", ""), self.key("run.name", "")
        folder = str(Path(str(root) or "runs", str(name), self.folder.name))
        return flatten(without_folder(folder, self.config))

    def refresh(self) -> None:
        """Reads incidents, goodput and crashes again, to which the run may have added."""
        self.incidents = read_incidents(self.folder)
        self.goodput = goodput.read(self.folder)
        crashes = [_read(path, json.loads) for path in (self.folder / CRASHES).glob("*.json")]
        crashes = [crash for crash in crashes if is_number(crash.get("step") or 0)]
        self.crashes = sorted(crashes, key=lambda crash: str(crash.get("time")))


def read_run(folder: Path, limit: int = 0) -> History:
    """Reads everything that `folder` has; missing parts are empty.

    Args:
        folder: runs/<name>/<id>.
        limit: Entries kept of a metric, see `Metrics`. 0 keeps all.

    Raises:
        InputError: it is not the folder of a run.
    """
    if last_write(folder) is None:
        raise InputError(
            f"{folder} is not the folder of a run: it has neither {CONFIG} nor {FILE}; give runs/<name>/<id>"
        )
    history = History(
        folder=folder,
        config=_read(folder / CONFIG, yaml.safe_load),
        defaults=_read(folder / DEFAULTS, yaml.safe_load),
        facts=_read(folder / FACTS, json.loads),
        metrics=read_metrics(folder, limit),
        environment=_read(folder / ENVIRONMENT, json.loads),
    )
    history.refresh()
    return history


def last_write(folder: Path) -> float | None:
    """Returns the Unix time of a run's last write; None if `folder` is not the folder of a run."""
    files = [folder / name for name in (CONFIG, FILE)]
    return max((file.stat().st_mtime for file in files if file.exists()), default=None)


def read_incidents(run: Path) -> list[Tree]:
    return read_lines(run / INCIDENTS)


def _read(path: Path, parse: Callable[[str], object]) -> Tree:
    cure = "restore it, or move it away: the rest of the run is then read without it"
    return read_mapping(path, cure, parse) if path.exists() else {}


def _at(tree: object, path: str, default: object) -> Any:
    for part in path.split("."):
        if isinstance(tree, dict) and part not in tree and "init_args" in tree:
            tree = tree["init_args"]
        if not isinstance(tree, dict) or part not in tree:
            return default
        tree = tree[part]
    return tree


def without_folder(folder: str, value: Any) -> Any:
    """Returns a configuration with "{run}" for the run's folder, which another run can use."""
    if isinstance(value, str):
        return value.replace(folder, "{run}")
    if isinstance(value, list):
        return [without_folder(folder, each) for each in value]
    if isinstance(value, dict):
        return {key: without_folder(folder, each) for key, each in value.items()}
    return value
