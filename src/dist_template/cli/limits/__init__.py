"""Finds combinations of settings that cannot work, before any process starts, in one sentence each.

A strategy refuses by itself (`refusals` of its class in `parallel.spec`); here is the rest.
It refuses what fails, not what is slow, such as tensor parallelism across nodes. Each check is a
function of plain values, so that a laptop can check the configuration of eight nodes with 8 GPUs.

The libraries refuse most of this too, but on every rank, in the middle of a start, and without the
name of a key. Checks that need the built model (its blocks, several optimizers) are left to them.

    machine.py    what is known before the start
    proven.py     models that did not train correctly in `python -m zoo`
    options.py    keys and callbacks that are replaced, unread keys
    unread.py     keys of methods that the module replaces
    training.py   strategies, precision, batches, schedule, the module's own check"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import lightning as L

from ...by_tokens import AUTO
from ...parallel.configured import NOT_READ_YET
from . import options, proven, training, unread
from .machine import Machine, Setup, spec_in

__all__ = ["Machine", "accumulated_batch", "least_batch", "refusal_of_strategy", "violations"]

TOPICS: tuple[Callable[[Setup], Iterator[str]], ...] = (
    options.replaced_keys,
    options.callbacks,
    options.saves_on_exceptions,
    options.flags,
    options.manual_optimization,
    training.precision,
    training.strategy,
    training.batches,
    training.optimization,
    options.ignored,
    unread.keys_of_replaced_methods,
    unread.typed_in_vain,
    training.of_module,
)


def violations(
    machine: Machine,
    trainer: Mapping[str, Any],
    module: L.LightningModule,
    data: Any,
    model_config: Any | None = NOT_READ_YET,
    trains: bool = True,
    saves_asynchronously: bool = False,
    typed: frozenset[str] = frozenset(),
) -> list[str]:
    """Returns a sentence for each thing that cannot work; starts nothing. `machine` need not be
    this one; `trainer` are the Trainer's keyword arguments, with an instantiated strategy;
    `model_config` is transformers', None for another kind of model, unknown by default. `trains`:
    whether the verb is `fit`; evaluation has no accumulation and no schedule.
    `saves_asynchronously` is last_checkpoint.asynchronous, and `typed` the keys that are flags of
    the command line: what a file sets for several models, or schedules, may have no effect."""
    if getattr(data, "global_batch_size", None) == AUTO:
        size = least_batch(machine, trainer, module, data)
        data = copy.copy(data)
        data.global_batch_size = size
    setup = Setup(machine, trainer, module, data, model_config, trains, saves_asynchronously, typed)
    found: list[str] = []
    for topic in TOPICS:
        found += topic(setup)
    if found:
        return found
    # Last: what a model computes under a strategy that cannot start is of no interest.
    return list(proven.refused(setup))


def notes(
    machine: Machine,
    trainer: Mapping[str, Any],
    module: L.LightningModule,
    data: Any,
    model_config: Any | None,
    typed: frozenset[str],
) -> list[str]:
    """Returns a line for each value of a file that has no effect on this model; the arguments are
    as in `violations`."""
    setup = Setup(machine, trainer, module, data, model_config, trains=True, typed=typed)
    return list(unread.notes(setup))


def refusal_of_strategy(
    machine: Machine,
    trainer: Mapping[str, Any],
    module: L.LightningModule,
    data: Any,
    model_config: Any | None,
) -> str:
    """Returns why `fit` refuses the strategy and the precision whatever the batches are; "" if it
    does not. The arguments are as in `violations`."""
    setup = Setup(machine, trainer, module, data, model_config, trains=False)
    for_training = replace(setup, trains=True)
    found = chain(training.precision(setup), training.strategy(setup), proven.refused(for_training))
    return next(found, "")


def data_parallel(machine: Machine, trainer: Mapping[str, Any]) -> int:
    """Returns the number of ranks that read different batches. Raises InputError for sizes of a
    strategy that do not fit."""
    return spec_in(trainer).data_parallel(machine.world_size)


def accumulated_batch(
    machine: Machine, trainer: Mapping[str, Any], module: L.LightningModule, data: Any
) -> int | None:
    """Returns data.global_batch_size as `trainer.accumulate_grad_batches` sets it; None if it does
    not. Raises InputError if both cannot hold."""
    return training.accumulated(Setup(machine, trainer, module, data, None, trains=True))


def least_batch(
    machine: Machine, trainer: Mapping[str, Any], module: L.LightningModule, data: Any
) -> int:
    """Returns the least data.global_batch_size, which stands in for auto until the rows of the data
    are known."""
    return training.least(Setup(machine, trainer, module, data, None, trains=True))
