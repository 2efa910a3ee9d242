"""Tasks of lm-eval and the user's own metric: a number for each sample, in one process."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, NamedTuple

from jsonargparse import ArgumentError, ArgumentParser
from jsonargparse.typing import PositiveInt

from ....cli.config_file import read as read_keys
from ....cli.parser import one_sentence
from ....errors import InputError, first_line, require
from ..export.trained import Trained

KEYS = {"tasks": [], "task_folder": None, "chat_template": False, "limit": None}
KEYS |= {"metric": None, "lower_is_better": False}  # configs/evaluate.yaml describes them
TYPES = (list[str], str | None, bool, PositiveInt | None, str | None, bool)


class Value(NamedTuple):
    """A measure of a model, by its number, for one sample."""

    model: int
    measure: str
    lower: bool  # lower is better
    sample: str
    value: float


def read(path: str | None) -> dict[str, Any]:
    """Returns the keys of a configuration; `metric` is the user's function.

    Raises:
        InputError: a key is unknown, or a package or the function is missing.
    """
    if not path:
        return dict(KEYS)
    given = read_keys(path)
    if unknown := sorted(given.keys() - KEYS.keys()):
        raise InputError(f"--config {path}: {unknown[0]} is not a key: give {', '.join(KEYS)}")
    parser = ArgumentParser(exit_on_error=False)
    for key, kind in zip(KEYS, TYPES, strict=True):
        parser.add_argument(f"--{key}", type=kind)
    try:
        parser.parse_object(given)
    except ArgumentError as error:
        why = one_sentence(" ".join(str(error).split()), {*KEYS})
        raise InputError(f"--config {path}: {why}") from error
    if given.get("tasks"):
        if not all(map(str.strip, given["tasks"])):
            raise InputError(f"--config {path}: tasks has an empty name; give names of lm-eval")
        require("lm_eval", "tasks")
    if name := given.get("metric"):
        module, _, function = name.partition(":")
        try:
            given["metric"] = getattr(importlib.import_module(module), function)
            inspect.signature(given["metric"]).bind("samples", "model", "tokenizer")
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            cure = "give module:function, a function of (samples, model, tokenizer)"
            why = f"metric {name!r} cannot be used ({first_line(error)}); {cure}"
            raise InputError(f"--config {path}: {why}") from error
    return KEYS | given


def values_of(number: int, loaded: Trained, keys: dict[str, Any], samples: list[dict[str, Any]]) -> list[Value]:
    """Returns the values of tasks and of the user's metric for model `number`."""
    found = []
    if metric := keys["metric"]:
        name, lower = metric.__name__, keys["lower_is_better"]
        values = metric(samples[: keys["limit"]], loaded.model, loaded.tokenizer)
        for sample, value in zip(samples, values, strict=False):
            found.append(Value(number, name, lower, sample["sample"], float(value)))
    if not keys["tasks"]:
        return found
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder, tasks = keys["task_folder"], keys["tasks"]
    try:
        results: Any = lm_eval.simple_evaluate(
            model=HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=8),
            tasks=tasks, limit=keys["limit"], log_samples=True, bootstrap_iters=0,
            task_manager=TaskManager(include_path=folder, include_defaults=folder is None),
            apply_chat_template=keys["chat_template"],
        )  # fmt: skip
    except (KeyError, ValueError, OSError) as error:
        what = f"lm-eval cannot run tasks {tasks} of task_folder {folder!r}"
        raise InputError(f"{what}: {first_line(error)}") from error
    for task, metrics in results["higher_is_better"].items():
        for metric, is_higher in metrics.items():
            for each in results["samples"][task]:
                name, sample = f"{task}/{metric}", str(each["doc_id"])
                found.append(Value(number, name, not is_higher, sample, float(each[metric])))
    return found
