"""How many optimizer steps a training has, and numbers in place of `auto`, before it starts.

Both need the rows of the data, so the tokens are ready by then, and the model's configuration is
known. A resume keeps the numbers of its checkpoint."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..by_tokens import AUTO
from ..checkpoint.identity import settings_of
from ..errors import InputError
from ..model.any_module import typed_attribute
from ..model.optim import OptimConfig

BATCH, RATE = "data.global_batch_size", "model.optim.learning_rate"
FEWEST = 5  # optimizer steps: six have learned, one has a rate of 0 (docs/finetune.md)


def choose(
    settings: dict[str, Any],
    trainer: Any,
    module: Any,
    data: Any,
    model_config: Any,
    checkpoint: str | None,
    world_size: int,
) -> Iterator[str]:
    """Replaces `auto` in `settings`, which config.yaml will have, and in `module` and `data`, whose
    batch is the least possible so far. Yields lines for the user, one of them with the number of
    steps; none for data without rows.

    `model_config` is transformers', `checkpoint` the one from which training resumes, `world_size`
    the number of data-parallel ranks. Raises InputError for a batch that the trainer or the ranks
    do not allow, and for the rate of a model that was not trained before."""
    optim = typed_attribute(module, "optim", OptimConfig)
    wants_rate = optim is not None and optim.learning_rate == AUTO
    knows_rows = hasattr(data, "steps_of_epoch")
    if wants_rate and not (knows_rows and hasattr(module, "rate_for")):
        raise InputError(
            f"{RATE} auto is for a TextModule on PackedText, not for {type(module).__name__} on"
            f" {type(data).__name__}: give a number, such as 3e-4"
        )
    if not knows_rows:
        return
    before, num_rows = settings_of(Path(checkpoint)) if checkpoint else {}, data.num_rows(module)
    if settings.get("data", {}).get("global_batch_size") == AUTO:
        size, least = before.get(BATCH), data.global_batch_size
        if isinstance(size, int) and size % least:  # another would change the schedule's steps
            raise InputError(
                f"{BATCH} auto keeps the checkpoint's {size}, and these ranks and micro-batches"
                f" need a multiple of {least}: give a number, or train on fewer ranks"
            )
        if not isinstance(size, int):
            limit = trainer.limit_train_batches
            size = data.batch_for(num_rows, trainer.max_epochs, least, limit, world_size)
        data.global_batch_size = settings["data"]["global_batch_size"] = size
        yield f"{BATCH} auto: {size}"
    data.trainer = trainer  # as Lightning attaches it later: the check knows its limits and phases
    data.check(world_size)
    steps, shown = _num_steps(trainer, data, num_rows, world_size)
    if wants_rate:
        replaced = (optim.optimizer_class or {}).get("init_args", {}).get("lr")
        rate = before.get(RATE) if replaced is None else replaced
        if not isinstance(rate, int | float):
            rate = module.rate_for(data, model_config, steps)
        optim.learning_rate = rate
        if isinstance(given := settings["model"].get("optim"), dict):
            given["learning_rate"] = rate
        if replaced is None:
            yield f"{RATE} auto: {rate:g}"
    yield f"training has {shown} of {data.seq_len:,} tokens"
    if steps < FEWEST and steps != trainer.max_steps and not trainer.fast_dev_run:
        advice = [f"raise trainer.max_epochs ({trainer.max_epochs})"]
        if data.global_batch_size > data.micro_batch_size * world_size:
            advice.append(f"lower {BATCH} ({data.global_batch_size})")
        yield (
            f"warning: {_steps(steps)}, and hardly anything is learned in fewer than {FEWEST}:"
            f" give more data, or {', or '.join(advice)}"
        )


def _steps(number: float) -> str:
    return f"{number:,} optimizer step" + "s" * (number != 1)


def _num_steps(trainer: Any, data: Any, num_rows: int, world_size: int) -> tuple[float, str]:
    """Returns the optimizer steps of a training, inf without an end, and words for them."""
    size = data.global_batch_size
    if isinstance(size, list):  # there are no epochs, so trainer.max_steps is set
        most = trainer.max_steps
        return most, f"{_steps(most)}, each of up to {data.batch_sizes[1]} rows"
    rows = f"{size} row" + "s" * (size > 1)
    of_epoch = data.steps_of_epoch(num_rows, trainer.limit_train_batches, world_size)
    epochs, most = trainer.max_epochs, trainer.max_steps
    by_epochs = epochs * of_epoch if epochs is not None and epochs >= 0 else math.inf
    if 0 <= most < by_epochs:
        passes = most / max(1, of_epoch)
        return most, f"{_steps(most)} ({passes:.3g} epochs), each of {rows}"
    if by_epochs == math.inf:
        return by_epochs, f"no last optimizer step ({of_epoch:,} in an epoch), each of {rows}"
    return by_epochs, f"{_steps(by_epochs)} ({epochs} x {of_epoch:,}), each of {rows}"
