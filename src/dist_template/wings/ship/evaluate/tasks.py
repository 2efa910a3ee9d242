"""Tasks of lm-eval: a number for each sample, in one process."""

from argparse import Namespace
from typing import Any

from ....errors import InputError, first_line
from ..export.trained import Trained

COLUMNS = ["model", "measure", "lower", "sample", "value"]  # lower: is better


def values_of(number: int, loaded: Trained, given: Namespace) -> list[tuple[object, ...]]:
    """Returns the rows of COLUMNS of the verb's tasks for model `number`."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder, tasks = given.task_folder, given.tasks
    try:
        results: Any = lm_eval.simple_evaluate(
            model=HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=8),
            tasks=tasks,
            limit=given.limit,
            log_samples=True,
            bootstrap_iters=0,
            task_manager=TaskManager(include_path=folder, include_defaults=folder is None),
            apply_chat_template=given.chat_template,
        )
    except (KeyError, ValueError, OSError) as error:
        what = f"lm-eval cannot run tasks {tasks} of task_folder {folder!r}"
        raise InputError(f"{what}: {first_line(error)}") from error
    found = []
    for task, metrics in results["higher_is_better"].items():
        # All samples with the first filter of answers, then all with the next one.
        samples = results["samples"][task]
        has_filters = samples[0]["filter"] != samples[-1]["filter"]
        for metric, is_higher in metrics.items():
            for each in samples:
                name = f"{task}/{metric}"
                if has_filters:
                    name += f",{each['filter']}"
                sample, value = str(each["doc_id"]), _number(name, each[metric])
                found.append((number, name, not is_higher, sample, value))
    return found


def _number(name: str, value: object) -> float:
    if isinstance(value, (tuple, list)):  # a perplexity's: nats and their unit
        raise InputError(
            f"tasks: {name} has no number for each sample; the split's bits_per_byte measures texts"
        )
    return float(value)  # ty: ignore[invalid-argument-type]
