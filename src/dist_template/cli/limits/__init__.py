"""What cannot work together, each told in one sentence before any process is started.

Only the impossible is refused, not the unwise: tensor parallelism across nodes is slow, and runs. Each topic is a
function that answers from plain values, so that a laptop can be asked about eight nodes of eight GPUs.

The libraries refuse most of this too, but on every rank, in the middle of a start, and in words that name no key. What
only the built model can tell (its blocks, several optimizers) is theirs to refuse.

    machine.py    what is known before the start          training.py   strategies, precision, loss, batches, schedule
    mesh.py       sizes, plans, heads, experts            zero.py       offload, clipping, the DeepSpeed JSON
    options.py    keys and callbacks that are replaced    values.py     single values: intervals, the model's sizes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning as L

from . import mesh, options, training, values, zero
from .machine import NOT_READ_YET, Machine, Setup

__all__ = ["Machine", "violations"]

TOPICS: tuple[Callable[[Setup], Iterator[str]], ...] = (
    training.other_strategies,
    options.replaced_keys,
    options.callbacks,
    options.batch_norm,
    training.precision,
    mesh.sizes,
    mesh.plans,
    mesh.heads,
    mesh.experts,
    mesh.optimizer,
    zero.clipping,
    zero.asynchronous,
    zero.offload,
    zero.checkpoints,
    zero.optimizer,
    zero.configuration,
    training.blocks,
    training.batches,
    training.optimization,
    training.plateau,
    training.monitors,
    values.intervals,
    values.architecture_keys,
    values.architecture,
)


def violations(
    machine: Machine,
    trainer: Mapping[str, Any],
    module: L.LightningModule,
    data: Any,
    model_config: Any | None = NOT_READ_YET,
    trains: bool = True,
    saves_asynchronously: bool = False,
    monitor: str | None = None,
) -> list[str]:
    """One sentence for each thing that cannot work; starts nothing.

    Args:
        machine: Where it is to run; need not be this one.
        trainer: The Trainer's keyword arguments, the strategy instantiated.
        module: What is trained.
        data: On what.
        model_config: Of transformers; None for a model that is none of transformers'. Left out: not known yet.
        trains: Whether it is for `fit`; evaluation divides no batch and has no schedule.
        saves_asynchronously: last_checkpoint.asynchronous.
        monitor: best_checkpoint.monitor, None where no best checkpoint is kept.
    """
    setup = Setup(machine, trainer, module, data, model_config, trains, saves_asynchronously, monitor)
    return [sentence for topic in TOPICS for sentence in topic(setup)]
