"""What every strategy shares: which there are, precision, blocks, the batch and the schedule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from sys import modules

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn

from ...errors import InputError, reason
from ...model.any_module import has_validation, own
from ...model.optim import build_optimizer, build_schedule
from ...parallel import data_parallel_size
from ...parallel.blocks import BlockConfig
from ...parallel.mesh import MeshStrategy
from ...parallel.zero import ZeroStrategy
from .machine import Setup

FSDPS = ("fsdp", "modelparallel")  # words and class names
PRECISIONS = {
    MeshStrategy: ("32-true", "bf16-mixed", "bf16-true", "16-true"),
    ZeroStrategy: ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"),
}


def other_strategies(setup: Setup) -> Iterator[str]:
    """Lightning's own that know neither a CPU nor transformers' plans, and class names where a string was read."""
    strategy = setup.strategy
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    if isinstance(strategy, MeshStrategy | ZeroStrategy):
        return
    if name in (MeshStrategy.__name__, ZeroStrategy.__name__):
        yield (
            f"trainer.strategy {name!r} is a class: give a file of configs/strategy/, or"
            f" --trainer.strategy.class_path {name}"
        )
    elif name.lower().startswith("deepspeed") or isinstance(strategy, DeepSpeedStrategy):
        files = "zero2.yaml (with stage: 1 for ZeRO-1) or zero3.yaml"
        yield f"trainer.strategy {name!r} is replaced by ZeroStrategy: use configs/strategy/{files}"
    elif name.lower().startswith(("fsdp", "modelparallel")) or isinstance(
        strategy, FSDPStrategy | ModelParallelStrategy
    ):
        files = "fsdp2.yaml, hsdp.yaml, fsdp2_tp.yaml or tp.yaml"
        yield f"trainer.strategy {name!r} is replaced by MeshStrategy: use configs/strategy/{files}"
    elif any(word in name for word in ("spawn", "fork", "notebook")):
        yield f"trainer.strategy {name!r} would lose the model's trainer on the way to its processes: set ddp"


def precision(setup: Setup) -> Iterator[str]:
    given = setup.machine.precision
    if given.startswith("transformer-engine") and not find_spec("transformer_engine"):
        yield (
            f"trainer.precision {given!r} needs the package transformer_engine, which is not installed: set bf16-mixed,"
            " bf16-true or 32-true"
        )
        return
    if given == "16-mixed" and setup.machine.accelerator == "cpu":
        yield "trainer.precision '16-mixed' does not exist on a CPU: set bf16-mixed or 32-true"
    for strategy, allowed in PRECISIONS.items():
        if isinstance(setup.strategy, strategy) and given not in allowed:
            yield (
                f"trainer.precision {given!r} does not exist under {strategy.__name__}: set {', '.join(allowed[:-1])}"
                f" or {allowed[-1]}"
            )


def blocks(setup: Setup) -> Iterator[str]:
    config = own(setup.module, "blocks", BlockConfig)
    if config is None:
        return
    if config.checkpoint_every < 1:
        yield f"model.blocks.checkpoint_every {config.checkpoint_every}: set 1 for every block, n for each n-th"
    zero_3 = isinstance(setup.strategy, ZeroStrategy) and setup.strategy.stage == 3
    if config.checkpointing == "selective" and (zero_3 or (setup.mesh and setup.mesh.ep > 1)):
        # torch 2.13: "encountered during backward but not found in storage", of the collective or of FSDP2's hook
        yield (
            f"model.blocks.checkpointing 'selective' cannot be had with {'ZeRO stage 3' if zero_3 else 'ep_size > 1'},"
            " which gathers weights inside of a block, anew in backward: set full"
        )


def batches(setup: Setup) -> Iterator[str]:
    """data.py's own check, with the ranks that each see a batch of their own."""
    if not setup.trains or (isinstance(setup.strategy, MeshStrategy) and setup.mesh is None):
        return
    try:
        ranks = data_parallel_size(setup.strategy, setup.machine.world_size)
        if hasattr(setup.data, "check"):
            setup.data.check(ranks)
    except InputError as error:
        yield str(error)


def optimization(setup: Setup) -> Iterator[str]:
    """optim.py's and torch's own checks: optimizer and schedule are built, and make a step, for next to nothing."""
    optim, steps = setup.optim, setup.num_steps
    if not setup.trains or optim is None:
        return
    layer = nn.Linear(1, 1)
    try:
        optimizer = build_optimizer(layer, optim)
        if steps is not None:
            build_schedule(optimizer, optim, steps)
        layer(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    except InputError as error:
        yield str(error)
    except ValueError as error:
        yield f"model.optim: {reason(error)}"
    except (RuntimeError, TypeError) as error:  # SparseAdam: dense gradients; LBFGS: a closure that it calls again
        yield f"--optimizer {type(optimizer).__name__}: {reason(error)}; choose another class"


def monitors(setup: Setup) -> Iterator[str]:
    """A misspelt metric, which would be found at the first validation; a metric of your own passes."""
    if not setup.trains:
        return
    optim, callbacks = setup.optim, setup.trainer.get("callbacks") or []
    named = {
        "best_checkpoint.monitor": setup.monitor,
        "model.optim.plateau_metric": getattr(optim, "plateau_metric", None),
    }
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        named[f"trainer.callbacks, {type(callback).__name__}.monitor,"] = getattr(callback, "monitor", None)
    known = [f"eval/{name}" for name in ("loss", "perplexity", "token_accuracy", "bits_per_byte")]
    file = getattr(modules.get(type(setup.module).__module__), "__file__", None)
    words = set(re.findall(r"\w+", Path(file).read_text(encoding="utf-8"))) if file else set()
    for key, metric in named.items():
        near = get_close_matches(str(metric), known, 1, 0.8) if metric not in known else []
        if near and str(metric).rpartition("/")[2] not in words:
            yield f"{key} is {metric!r}, which no validation measures; did you mean {near[0]}?"


def plateau(setup: Setup) -> Iterator[str]:
    """reduce_on_plateau without a validation never acts, and nothing says so."""
    optim, trainer = setup.optim, setup.trainer
    if not setup.trains or optim is None or not optim.waits_for_validation:
        return
    key = "--lr_scheduler ReduceLROnPlateau" if optim.lr_scheduler else "model.optim.schedule 'reduce_on_plateau'"
    waits = f"{key} waits for validations"
    if not has_validation(setup.module, setup.data):
        none = "data.validation_share is 0" if hasattr(setup.data, "validation_share") else "there is no val_dataloader"
        yield f"{waits}, and {none}: edit one of the two"
    elif trainer.get("limit_val_batches") == 0:
        yield f"{waits}, and trainer.limit_val_batches is 0: edit one of the two"
    elif isinstance(every := trainer.get("val_check_interval"), int) and every > (setup.num_steps or every):
        yield (
            f"{waits}, and the first is at step {every}, after the end at {trainer['max_steps']}: edit"
            " trainer.val_check_interval or trainer.max_steps"
        )
