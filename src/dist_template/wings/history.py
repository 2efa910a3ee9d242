"""What a run has recorded: its files in one object, and its metrics over steps. Without torch.

Steps are optimizer steps. A resumed run appends: for steps that it repeats, the newer line of
metrics.jsonl counts."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ..errors import InputError, first_line
from ..foreign import refuse_links
from ..observe.history import goodput
from ..observe.history.run import RunFile, is_number, read_lines, without_folder
from ..records import flatten, read_mapping

_MISSING = object()  # is no value of a configuration
Tree = dict[str, Any]  # the content of a JSON or YAML file


@dataclass(frozen=True)
class Series:
    """One metric. Both arrays have N entries, in the order of their steps."""

    steps: np.ndarray  # int64
    values: np.ndarray  # float64; NaN and infinities are kept

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float:
        return float(self.values[-1])

    def finite(self) -> Series:
        return self[np.isfinite(self.values)]

    def __getitem__(self, which: Any) -> Series:
        """Returns a part of the series, by a slice, a mask or indices."""
        return Series(self.steps[which], self.values[which])


@dataclass
class Metrics:
    """Every metric of a run."""

    # of entries of a metric; beyond it, every second one of the older half is dropped. 0: none
    limit: int = 0
    # step and value of each entry, one after another: NumPy copies an array faster than lists
    _entries: dict[str, array[float]] = field(default_factory=dict)

    def add(self, line: dict[str, Any]) -> None:
        step = int(line["step"])
        for name, value in line.items():
            if name in ("step", "time") or not isinstance(value, int | float):
                continue
            entries = self._entries.setdefault(name, array("d"))
            while entries and entries[-2] >= step:  # a resumed run repeats these steps
                del entries[-2:]
            entries.extend((step, value))
            if self.limit and len(entries) > 2 * self.limit:
                kept = np.delete(np.reshape(entries, (-1, 2)), np.s_[: self.limit // 2 : 2], axis=0)
                self._entries[name] = array("d", kept.ravel())

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def names(self) -> list[str]:
        return sorted(self._entries)

    def __getitem__(self, name: str) -> Series:
        """Returns the metric; an empty series if it was never logged."""
        steps, values = np.array(self._entries.get(name, ())).reshape(-1, 2).T
        return Series(steps.astype(np.int64), values)


@dataclass
class History:
    """Records of a run; `read_run` reads them, wings/diagnose/callback.py adds to them. `metrics`
    are by name, over optimizer steps; `environment` is the newest attempt's; `goodput` has the
    seconds of each kind over all attempts; `incidents` and `crashes` are in the order of time."""

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
        return [
            name for name in (RunFile.METRICS, RunFile.FACTS) if not (self.folder / name).exists()
        ]

    def key(self, path: str, default: object = None) -> Any:
        """Returns the configuration's value at a path such as "trainer.max_steps"; it may omit
        `init_args`."""
        return _at(self.config, path, default)

    def number(self, path: str, default: int = 0) -> Any:
        """Returns the configuration's value at a path if it is a number, else `default`: the keys
        of a user's own classes may have any type."""
        value = self.key(path)
        is_one = isinstance(value, int | float) and not isinstance(value, bool)
        return value if is_one else default

    def fact(self, path: str, default: object = None) -> Any:
        """Returns the value of facts.json at a path such as "parameters.active"."""
        return _at(self.facts, path, default)

    @property
    def is_text(self) -> bool:
        """Whether the run is of a language model on tokens, or nothing is known of its data."""
        if self.key("data.tokenizer") is not None:
            return True
        data = self.fact("data")
        return data is None or self.fact("data.tokens_per_step") is not None

    def has_key(self, path: str) -> bool:
        """Returns whether the configuration has a key, as `model.optim.learning_rate`. A section
        that was not recorded has any key."""
        section, _, rest = path.partition(".")
        return self.config.get(section) is None or not rest or self.key(path, _MISSING) != _MISSING

    def portable_config(self) -> Tree:
        """Returns the flat configuration, with "{run}" for the run's own folder, as users write
        it."""
        root, name = self.key("run.root", ""), self.key("run.name", "")
        folder = str(Path(str(root) or "runs", str(name), self.folder.name))
        return flatten(without_folder(folder, self.config))

    def refresh(self) -> None:
        """Reads incidents, goodput and crashes again, to which the run may have added."""
        self.incidents = read_lines(self.folder / RunFile.INCIDENTS)
        self.goodput = goodput.read(self.folder)
        crashes = [
            _read(path, json.loads) for path in (self.folder / RunFile.CRASHES).glob("*.json")
        ]
        crashes = [crash for crash in crashes if is_number(crash.get("step") or 0)]
        self.crashes = sorted(crashes, key=lambda crash: str(crash.get("time")))


@contextmanager
def of_any_types(runs: Iterable[Path]) -> Generator[None]:
    """Inside, raises InputError in place of the errors of values that no run writes: a stranger, or
    another program, may have written a number as a list. TRACEBACK=1 shows the error itself."""
    try:
        yield
    except InputError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise InputError(
            f"a file of {', '.join(map(str, runs))} has a value that no run writes"
            f" ({type(error).__name__}: {first_line(error)}): restore the run's files; TRACEBACK=1"
            " shows where it is read"
        ) from error


SECTIONS = ("run", "trainer", "model", "data")  # one of them is in any configuration


def read_run(folder: Path, limit: int = 0) -> History:
    """Reads everything that `folder`, runs/<name>/<id>, has; missing parts are empty. `limit`:
    entries kept of a metric, see `Metrics`. Raises InputError if it is not the folder of a run."""
    if last_write(folder) is None:
        raise InputError(
            f"{folder} is not the folder of a run: it has neither {RunFile.CONFIG} nor"
            f" {RunFile.METRICS}; give runs/<name>/<id>"
        )
    refuse_links(folder)
    metrics = Metrics(limit)
    for line in read_lines(folder / RunFile.METRICS, "step"):
        metrics.add(line)
    history = History(
        folder=folder,
        config=_read(folder / RunFile.CONFIG, yaml.safe_load),
        defaults=_read(folder / RunFile.DEFAULTS, yaml.safe_load),
        facts=_read(folder / RunFile.FACTS, json.loads),
        metrics=metrics,
        environment=_read(folder / RunFile.ENVIRONMENT, json.loads),
    )
    if history.config and not metrics.names and not {*SECTIONS} & history.config.keys():
        raise InputError(
            f"{folder} is not the folder of a run: its {RunFile.CONFIG} has none of the sections"
            f" {', '.join(SECTIONS)}; give runs/<name>/<id>"
        )
    history.refresh()
    return history


def last_write(folder: Path) -> float | None:
    """Returns the Unix time of a run's last write; None if `folder` is not the folder of a run."""
    files = [folder / name for name in (RunFile.CONFIG, RunFile.METRICS)]
    return max((file.stat().st_mtime for file in files if file.exists()), default=None)


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
