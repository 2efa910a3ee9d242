"""Differences of a run's configuration from the defaults, and between the configurations of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...records import flatten
from ..history.run import History, without_folder

NOT_SET = "–"  # the configuration has no such key, because it has another class there
WHERE = ("run", "ckpt_path", "config", "data.cache_dir")  # keys of paths, which change no result


def from_defaults(history: History) -> list[tuple[str, Any, Any]]:
    """Returns (key, value, default) of each key whose value is not its default; [] if the run recorded no defaults."""
    defaults = flatten(history.defaults)
    found = [(key, value, defaults.get(key, NOT_SET)) for key, value in config_of(history).items() if defaults]
    return [(key, value, default) for key, value, default in found if value != default]


def between(configs: list[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Returns (key, each configuration's value) of the keys that differ, of flat configurations."""
    keys = list(dict.fromkeys(key for config in configs for key in config))
    rows = [(key, [config.get(key, NOT_SET) for config in configs]) for key in keys if not _is(key, WHERE)]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def config_of(history: History) -> dict[str, Any]:
    """Returns the flat configuration, with "{run}" for the run's own folder, as users write it."""
    own = str(Path(str(history.key("run.root", "runs"))) / str(history.key("run.name", "")) / history.folder.name)
    return {key: without_folder(own, value) for key, value in flatten(history.config).items()}


def _is(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
