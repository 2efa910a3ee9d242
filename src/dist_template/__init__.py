"""Starts, runs and watches distributed training of a LightningModule: the library behind the
project template.

Names are imported when they are first used: `python -m <package> --help` needs no torch."""

from .lazy import attribute_of

PLACES = {  # public name -> the module that defines it
    "main": "cli.main",
    "InputError": "errors",
    "Ended": "errors",
    "Project": "project",
    "Flags": "project",
    "TrainingModule": "model.training_module",
    "RunCallback": "run_callback",
    "RunLogger": "run_callback",
    "AdapterConfig": "text.model.adapters",
    "BlockConfig": "parallel.blocks",
    "BalanceConfig": "model.balance",
    "OptimConfig": "model.optim",
}

__all__ = [*PLACES]  # noqa: PLE0604  (lazy)
__getattr__ = attribute_of(__name__, PLACES)


def __dir__() -> list[str]:
    return sorted({*globals(), *PLACES})
