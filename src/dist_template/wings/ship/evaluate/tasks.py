"""Tasks of lm-eval: a number for each sample, in one process."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentError, ArgumentParser
from jsonargparse.typing import PositiveInt

from ....cli.config_file import read as read_keys
from ....cli.parser import one_sentence
from ....errors import InputError, first_line, require
from ..export.trained import Trained

COLUMNS = ["model", "measure", "lower", "sample", "value"]  # lower: is better


def read(path: str | None) -> dict[str, Any]:
    """Returns the keys of a configuration.

    Raises:
        InputError: a key is unknown or has another type, or lm-eval is missing.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--tasks", type=list[str], default=[])  # configs/evaluate.yaml describes them
    parser.add_argument("--task_folder", type=str | None)
    parser.add_argument("--chat_template", type=bool, default=False)
    parser.add_argument("--limit", type=PositiveInt | None)
    try:
        keys = vars(parser.parse_object(read_keys(path) if path else {}))
    except ArgumentError as error:
        why = one_sentence(" ".join(str(error).split()), {*vars(parser.get_defaults())})
        raise InputError(f"--config {path}: {why}") from error
    if not all(map(str.strip, keys["tasks"])):
        raise InputError(f"--config {path}: tasks has an empty name; give names of lm-eval")
    if keys["tasks"]:
        require("lm_eval", "tasks")
    return keys


def values_of(number: int, loaded: Trained, keys: dict[str, Any]) -> list[tuple[object, ...]]:
    """Returns the rows of COLUMNS of tasks for model `number`."""
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
    found = []
    for task, metrics in results["higher_is_better"].items():
        for metric, is_higher in metrics.items():
            for each in results["samples"][task]:
                name, sample = f"{task}/{metric}", str(each["doc_id"])
                found.append((number, name, not is_higher, sample, float(each[metric])))
    return found
