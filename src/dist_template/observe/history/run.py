"""The names of the files in a run's folder, and what reads their lines."""

import json
from argparse import Namespace
from enum import StrEnum
from pathlib import Path
from typing import Any

from ...foreign import MOST_BYTES

__all__ = ["PLACEHOLDER", "RunFile", "is_number", "read_lines", "without_folder"]


class RunFile(StrEnum):
    """Names in a run's folder."""

    CONFIG = "config.yaml"
    DEFAULTS = "defaults.yaml"  # of the keys
    ENVIRONMENT = "environment.json"
    FACTS = "facts.json"  # what is constant in a training
    # a line for each log call: {"step": 40, "time": 1763766000.1, "train/loss": 2.31, …}
    METRICS = "metrics.jsonl"
    INCIDENTS = "incidents.jsonl"  # anomalous steps
    CRASHES = "crash"  # a folder of records
    GOODPUT = "goodput.jsonl"


MOST = 4 * 2**20  # characters of a line
PLACEHOLDER = "{run}"  # stands for the run's folder in any text of a configuration


def is_number(value: Any) -> bool:
    """Returns whether a step, a time or a duration is one."""
    return isinstance(value, int | float) and -(2**53) < value < 2**53


def _integer(digits: str) -> float:
    if len(digits) < 20:
        return int(digits)
    return float(digits)  # float() of a longer int may fail


def read_lines(path: Path, *numbers: str) -> list[dict[str, Any]]:
    """Returns the objects of a JSONL file, if it exists; incomplete and damaged lines are skipped.
    `numbers` are keys that an object must have with a number."""
    if not path.is_file():  # also of a FIFO, which would wait for a writer
        return []
    found = []
    with path.open(encoding="utf-8", errors="replace") as file:
        length = 0  # of the line so far
        while line := file.readline(MOST):  # of a longer line, each part is damaged
            length = 0 if line.endswith("\n") else length + len(line)
            if length > MOST_BYTES:  # zeros, or another file: a sparse one would not end for hours
                break
            try:
                read = json.loads(line, parse_int=_integer)
                if isinstance(read, dict) and all(is_number(read[key]) for key in numbers):
                    found.append(read)
            except (ValueError, LookupError, TypeError, RecursionError):
                continue
    return found


def without_folder(folder: str, value: Any) -> Any:
    """Returns a configuration with PLACEHOLDER for the run's folder, which another run can use."""
    return replaced(value, folder, PLACEHOLDER)


def replaced(value: Any, old: str, new: str) -> Any:
    """Returns a configuration with `new` for `old` in every text."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, list):
        return [replaced(item, old, new) for item in value]
    if isinstance(value, dict):
        return {key: replaced(item, old, new) for key, item in value.items()}
    if isinstance(value, Namespace):
        return type(value)(**replaced(vars(value), old, new))
    return value
