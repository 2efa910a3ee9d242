"""Differences of a run's configuration from the defaults, and between several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....observe.history.run import History, without_folder
from ....records import flatten

NOT_SET = "–"  # the configuration has no such key, because it has another class there
WHERE = ("run", "ckpt_path", "config", "data.cache_dir")  # keys of paths, which change no result


def from_defaults(history: History) -> list[tuple[str, Any, Any]]:
    """Returns (key, value, default) where they differ; [] if the run recorded no defaults."""
    defaults, found = flatten(history.defaults), []
    for key, value in config_of(history).items():
        default = defaults.get(key, NOT_SET)
        if defaults and value != default:
            found.append((key, value, default))
    return found


def between(configs: list[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Returns (key, each configuration's value) of the keys that differ, of flat configurations."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = []
    for key in keys:
        values = [config.get(key, NOT_SET) for config in configs]
        if not _is(key, WHERE) and any(value != values[0] for value in values):
            rows.append((key, values))
    return rows


def config_of(history: History) -> dict[str, Any]:
    """Returns the flat configuration, with "{run}" for the run's own folder, as users write it."""
    root, name = (str(history.key(f"run.{key}", "")) for key in ("root", "name"))
    own = str(Path(root or "runs") / name / history.folder.name)
    return {key: without_folder(own, value) for key, value in flatten(history.config).items()}


def _is(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
