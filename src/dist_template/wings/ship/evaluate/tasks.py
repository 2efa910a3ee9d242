"""Tasks of lm-eval: a number for each sample, in one process."""

from typing import Any

from ....cli.config_file import read as read_keys
from ....errors import InputError, first_line, require
from ..export.trained import Trained

KEYS: dict[str, tuple[object, str]] = {  # configs/evaluate.yaml describes them: default, what is allowed
    "tasks": ([], "a list of names of lm-eval"),
    "task_folder": (None, "a folder, or null"),
    "chat_template": (False, "true or false"),
    "limit": (None, "samples of each task, 1 or more, or null"),
}
COLUMNS = ["model", "measure", "lower", "sample", "value"]  # lower: is better


def read(path: str | None) -> dict[str, Any]:
    """Returns the keys of a configuration. Raises InputError if a key is unknown or has another type, or lm-eval is
    missing."""
    given = read_keys(path) if path else {}
    keys: dict[str, Any] = {name: default for name, (default, _) in KEYS.items()} | given
    names, limit = keys["tasks"], keys["limit"]
    is_right = {
        "tasks": isinstance(names, list) and all(isinstance(name, str) and name.strip() for name in names),
        "task_folder": isinstance(keys["task_folder"], str | None),
        "chat_template": isinstance(keys["chat_template"], bool),
        "limit": limit is None or (type(limit) is int and limit > 0),
    }
    for name, value in given.items():
        if name not in KEYS:
            raise InputError(f"--config {path}: {name} is not a key of evaluate; its keys are {', '.join(KEYS)}")
        if not is_right[name]:
            raise InputError(f"--config {path}: {name} is {value!r}; give {KEYS[name][1]}")
    if keys["tasks"]:
        require("lm_eval", "tasks", extra="evaluate")
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
        samples = results["samples"][task]  # each as often as the task has filters of an answer, one after another
        has_filters = samples[0]["filter"] != samples[-1]["filter"]
        for metric, is_higher in metrics.items():
            for each in samples:
                name = f"{task}/{metric}"
                if has_filters:
                    name += f",{each['filter']}"
                found.append((number, name, not is_higher, str(each["doc_id"]), _number(name, each[metric])))
    return found


def _number(name: str, value: object) -> float:
    if isinstance(value, (tuple, list)):  # a perplexity's: nats and their unit
        raise InputError(f"tasks: {name} has no number for each sample; the split's bits_per_byte measures texts")
    return float(value)  # ty: ignore[invalid-argument-type]
