"""What differs: a run's configuration from the defaults, and those of several runs from each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..history.run import History, without_folder

NOT_SET = "–"  # a key that the other configuration does not have at all: another class was chosen there
SEEDS = ("seed_everything", "data.seed")
WHERE = ("run", "ckpt_path", "config", "data.cache_dir")  # keys that say where things lie, and change no result


def from_defaults(history: History) -> list[tuple[str, Any, Any]]:
    """(key, value, default) of each key that is not at its default; [] where the defaults were not written down."""
    defaults = flat(history.defaults)
    found = [(key, value, defaults.get(key, NOT_SET)) for key, value in config_of(history).items() if defaults]
    return [(key, value, default) for key, value, default in found if value != default]


def between(configs: list[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    """(key, each one's value) of the flat mappings' keys that are not equal in all."""
    keys = list(dict.fromkeys(key for config in configs for key in config))
    rows = [(key, [config.get(key, NOT_SET) for config in configs]) for key in keys if not _is(key, WHERE)]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def groups(histories: list[History]) -> list[list[int]]:
    """Which runs are repetitions of each other: their configurations differ in seeds alone. Indices into `histories`.

    A run whose configuration is not known is alone.
    """
    found: dict[str, list[int]] = {}
    for index, history in enumerate(histories):
        config = {key: value for key, value in config_of(history).items() if not _is(key, (*SEEDS, *WHERE))}
        found.setdefault(json.dumps(config, sort_keys=True, default=str) if config else str(index), []).append(index)
    return list(found.values())


def config_of(history: History) -> dict[str, Any]:
    """Flat; the run's own folder is written "{run}", as a user writes it."""
    own = str(Path(str(history.key("run.root", "runs"))) / str(history.key("run.name", "")) / history.folder.name)
    return {key: without_folder(own, value) for key, value in flat(history.config).items()}


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"trainer.max_steps": 100}. A class is the value of its own key, its arguments lie below; lists are values."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and "class_path" in value:
            found[path] = str(value["class_path"]).rsplit(".", 1)[-1]
            value = value.get("init_args") or {}
        if isinstance(value, dict):
            found |= flat(value, f"{path}.")
        else:
            found[path] = value
    return found


def _is(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
