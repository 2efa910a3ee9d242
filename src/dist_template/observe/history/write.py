"""Files of a run's folder that a later attempt writes again: the earlier attempt's are kept beside them, numbered."""

from __future__ import annotations

import json
from pathlib import Path

from ...cluster.environment import environment
from .run import DEFAULTS


def write_record(run: Path, config_yaml: str, defaults_yaml: str) -> None:
    """Write config.yaml and environment.json; a resumed run keeps the earlier ones beside them, numbered.

    And defaults.yaml, the same keys as nobody has set them, for the report.
    """
    run.mkdir(parents=True, exist_ok=True)
    (run / DEFAULTS).write_text(defaults_yaml, encoding="utf-8")
    for name, text in (("config.yaml", config_yaml), ("environment.json", json.dumps(environment(), indent=2))):
        write_numbered(run / name, text)


def write_numbered(path: Path, text: str) -> None:
    """Write a file of the run's, whole or not at all; an earlier attempt's is kept, as `<name>.<n>.<ending>`."""
    aside = path.parent / f".{path.name}.tmp"
    aside.write_text(text, encoding="utf-8")
    if path.exists():
        earlier = len(list(path.parent.glob(f"{path.stem}.*{path.suffix}")))
        path.rename(path.parent / f"{path.stem}.{earlier}{path.suffix}")
    aside.rename(path)
