"""Checks under every strategy: precision, batches, optimizer, schedule, the model's sizes."""

from collections.abc import Iterator

from torch import nn

from ...errors import InputError, reason
from ...model.optim import build_optimizer, build_schedule
from .machine import Setup


def strategy(setup: Setup) -> Iterator[str]:
    return setup.spec.refusals(setup)


def precision(setup: Setup) -> Iterator[str]:
    if setup.machine.precision == "16-mixed" and setup.machine.accelerator == "cpu":
        yield "trainer.precision '16-mixed' does not exist on a CPU: set bf16-mixed or 32-true"


def batches(setup: Setup) -> Iterator[str]:
    """The data module's own check, with the number of data-parallel ranks."""
    if not setup.trains or not hasattr(setup.data, "check"):
        return
    try:
        ranks = setup.spec.data_parallel(setup.machine.world_size)
    except InputError:
        return  # the strategy reports that its sizes do not fit
    try:
        setup.data.check(ranks)
    except InputError as error:
        yield str(error)


def accumulated(setup: Setup) -> int | None:
    """Returns the sequences of an optimizer step that `trainer.accumulate_grad_batches` asks for
    with a data module that derives the accumulation; None if it asks for nothing. Raises
    InputError if the batch grows."""
    batches = setup.trainer.get("accumulate_grad_batches")
    if not batches or batches == 1:
        return None
    if not setup.trains or not hasattr(setup.data, "micro_batch_size"):
        return None
    if isinstance(setup.data.global_batch_size, list):
        raise InputError(
            f"trainer.accumulate_grad_batches {batches} and phases of data.global_batch_size both"
            " give the accumulation: remove one"
        )
    try:
        ranks = setup.spec.data_parallel(setup.machine.world_size)
    except InputError:
        return None  # the strategy reports that its sizes do not fit
    return batches * setup.data.micro_batch_size * ranks


def least(setup: Setup) -> int:
    """Returns the fewest sequences of an optimizer step, in place of data.global_batch_size auto:
    that which is chosen when the rows are known is a multiple of them."""
    ranks, rows = setup.machine.world_size, setup.data.micro_batch_size
    try:
        return setup.spec.rows_together(ranks, rows)
    except InputError:
        return rows * ranks  # the strategy reports that its sizes do not fit


def optimization(setup: Setup) -> Iterator[str]:
    """Builds the optimizer and the schedule for two layers: optim.py and torch check arguments."""
    optim, steps = setup.optim, setup.num_steps
    if not setup.trains or optim is None:
        return
    try:
        optimizer = build_optimizer(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), optim)
        if steps is not None:
            build_schedule(optimizer, optim, steps, data=setup.data)
    except InputError as error:
        yield str(error)
    except ValueError as error:
        yield f"model.optim: {reason(error)}"


def of_module(setup: Setup) -> Iterator[str]:
    """The module's own check, as TextModule has for adapters, keys and preferences."""
    check = getattr(setup.module, "refusals", None)
    if callable(check):
        yield from check(setup)
