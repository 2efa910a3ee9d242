"""What `auto` stands for in a fine-tuning: the batch and the learning rate, by data and method.

`fit` asks when the rows of the data are known. The numbers that it gets are in the run's
config.yaml, and a resume keeps those of its checkpoint. docs/finetune.md has what was measured.

    data.global_batch_size      the rows of a step that leave the training MANY_STEPS steps
    model.optim.learning_rate   of the method, for the model's width; of preferences by the steps"""

from typing import Any

from ..errors import InputError

__all__ = ["batch_for"]

MANY_STEPS = 64  # optimizer steps that a batch leaves, if the data have so many rows
LARGEST = 32  # rows of a step; more are for thousands of steps, and the user's decision

# AdamW's peak rate at a width of 2,000, how it falls with the width (of Llama; of Qwen less), and
# how much higher that of adapters of any rank is: the hyperparameters in Tinker's documentation, by
# Thinking Machines, "LoRA Without Regret" (2025), of models from 1 to 70 B.
RATE, WIDTH, POWER, OF_ADAPTERS = 5e-5, 2000, 0.781, 10.0


def batch_for(rows: int, epochs: float, multiple: int, *, divides: bool = False) -> int:
    """Returns the rows of an optimizer step: the largest power of two up to LARGEST with which
    `epochs` passes over `rows` have MANY_STEPS steps, raised to a multiple of `multiple`, which is
    at most `rows`. With `divides` it is lowered until it divides `rows`, which a limit has left."""
    size = 1
    while size < LARGEST and rows >= 2 * size and rows * epochs >= 2 * size * MANY_STEPS:
        size *= 2
    together = -(-size // multiple) * multiple
    while divides and size > 1 and rows % together:
        size //= 2
        together = -(-size // multiple) * multiple
    if together > rows:
        together = max(1, rows // multiple) * multiple
    return together


def rate_for(module: Any, data: Any, config: Any, steps: float) -> float:
    """Returns the peak learning rate of AdamW for `steps` optimizer steps of a TextModule on
    `data`; `config` is its model's configuration of transformers.

    Raises InputError if the model is trained from scratch, or its width is not known."""
    key = "model.optim.learning_rate auto"
    if not getattr(module, "pretrained", None):
        raise InputError(
            f"{key} is for weights that were trained before, and model.pretrained is null: give a"
            " number, such as 3e-4"
        )
    width = None
    if config:
        width = getattr(config.get_text_config(), "hidden_size", None)
    if not width:
        raise InputError(f"{key} needs a model whose configuration has hidden_size: give a number")
    rate = RATE * (WIDTH / width) ** POWER
    if module.adapter is not None:
        rate *= OF_ADAPTERS
    rate *= module.objective_for(data).rate_share(steps)
    return float(f"{rate:.2g}")
