"""Ranges of arguments of other libraries, which cannot be declared at the arguments themselves.

Lightning 2.6, torch 2.13 and transformers 5.23 accept these numbers, and fail later: in a step, in
a worker, or not at all. The rest they check themselves. A range whose argument is gone has no
effect; tests/cli/test_options.py finds it."""

from collections.abc import Mapping
from inspect import signature
from typing import Annotated, Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..ranges import (
    Folder,
    NonNegativeFloat,
    NonNegativeInt,
    NotZero,
    NumNodes,
    PositiveFloat,
    PositiveInt,
    Range,
    Seed,
)

Devices = Range(ge=-1, le=1024)
RATES = NonNegativeFloat | list[NonNegativeFloat]

# Base class: types of arguments of this class, and of those below it in the same library.
ARGUMENTS: dict[type, dict[str, Any]] = {
    Trainer: {
        "accumulate_grad_batches": PositiveInt,
        "check_val_every_n_epoch": PositiveInt,
        "default_root_dir": Folder,
        # 0 is none; in a list it is the first device
        "devices": Annotated[int, NotZero(allowed="1 or more, or auto"), Devices]
        | list[Annotated[int, Devices]],
        "gradient_clip_val": NonNegativeFloat,
        "limit_train_batches": PositiveFloat,
        "log_every_n_steps": PositiveInt,
        "num_nodes": NumNodes,
        "num_sanity_val_steps": Annotated[int, Range(ge=-1)],
        "reload_dataloaders_every_n_epochs": NonNegativeInt,
        "val_check_interval": PositiveFloat,
    },
    Logger: {"save_dir": Folder},
    Optimizer: {
        "lr": NonNegativeFloat,
        "ns_steps": Annotated[int, Range(ge=1, le=99)],  # Muon's, checked in the first step
    },
    LRScheduler: {
        "T_max": PositiveInt,
        "base_lr": RATES,
        "cooldown": NonNegativeInt,
        "div_factor": PositiveFloat,
        "end_factor": NonNegativeFloat,
        "eta_min": NonNegativeFloat,
        "factor": NonNegativeFloat,
        "final_div_factor": PositiveFloat,
        "gamma": PositiveFloat,
        "max_lr": PositiveFloat | list[PositiveFloat],
        "milestones": list[NonNegativeInt],
        "min_lr": RATES,
        "patience": NonNegativeInt,
        "power": PositiveFloat,
        "step_size": PositiveInt,
        "step_size_down": PositiveInt,
        "step_size_up": PositiveInt,
        "total_iters": PositiveInt,
    },
}
# Keys that LightningCLI itself adds.
KEYS: dict[str, Any] = {"seed_everything": Seed}


def arguments_of(kind: type) -> dict[str, Any]:
    """Returns the types of arguments that the constructor of `kind` itself has, by this table."""
    library = kind.__module__.partition(".")[0]
    found: dict[str, Any] = {}
    for base, types in ARGUMENTS.items():
        if issubclass(kind, base) and base.__module__.partition(".")[0] == library:
            given = signature(kind.__init__).parameters
            found |= {name: each for name, each in types.items() if name in given}
    return found


def fields_of_model(fields: Mapping[str, object]) -> dict[str, Any]:
    """Returns the types of fields of a transformers configuration, in a mapping with its
    `model_type`: numbers of layers, heads, experts, of which transformers checks few."""
    if "model_type" not in fields:
        return {}
    return {name: NonNegativeInt for name in fields if name.startswith("num_")}
