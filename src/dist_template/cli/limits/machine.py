"""What is known of a training before it starts, from plain values: the machine it describes need not be this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import lightning as L
import torch

from ...errors import InputError, reason
from ...model.any_module import own
from ...model.optim import OptimConfig
from ...parallel.mesh import MeshSizes, MeshStrategy

NOT_READ_YET: Final = object()  # the model's configuration needs the vocabulary, and so the data, first
ARGS = "trainer.strategy.init_args"

_PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


@dataclass(frozen=True)
class Machine:
    """What training runs on; `precision` in Lightning's words (32-true, bf16-mixed, bf16-true, 16-mixed …)."""

    accelerator: str  # cpu, cuda, mps …
    devices: int  # of one node
    num_nodes: int = 1
    precision: str = "32-true"
    is_this_one: bool = False  # only then can its disks be looked at

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes

    @classmethod
    def of(cls, trainer: Mapping[str, Any]) -> Machine:
        """This machine, as far as the Trainer's keyword arguments ask for it.

        Raises:
            InputError: it does not have what they ask for.
        """
        asked = {key: trainer[key] for key in ("accelerator", "devices", "num_nodes") if key in trainer}
        try:  # a Trainer of nothing else: Lightning knows what `auto` is, what there is, and what a scheduler has given
            found = L.Trainer(**asked, logger=False, enable_checkpointing=False, enable_progress_bar=False)
        except Exception as error:  # MisconfigurationException, ValueError or RuntimeError, by what is wrong
            told = ", ".join(f"trainer.{key} {value!r}" for key, value in asked.items())
            gpus = f"{torch.accelerator.device_count() or 'no'} GPU(s)"
            why = reason(error).rstrip("!")
            raise InputError(f"{told} cannot be had here, with {gpus}: {why}; edit one of these keys") from error
        precision = str(trainer.get("precision") or "32-true")
        accelerator = type(found.accelerator).name()
        return cls(accelerator, found.num_devices, found.num_nodes, _PRECISIONS.get(precision, precision), True)


@dataclass(frozen=True)
class Setup:
    """All that `limits.violations` was given."""

    machine: Machine
    trainer: Mapping[str, Any]
    module: L.LightningModule
    data: Any
    model_config: Any
    trains: bool
    saves_asynchronously: bool = False
    monitor: str | None = None

    @property
    def optim(self) -> OptimConfig | None:
        """The keys under model.optim; None for a module with another optimizer."""
        return own(self.module, "optim", OptimConfig)

    @property
    def strategy(self) -> Any:
        return self.trainer.get("strategy") or "auto"

    @property
    def mesh(self) -> MeshSizes | None:
        """Where the strategy is a mesh, and its sizes can be had of the machine."""
        try:
            return self.strategy.sizes(self.machine.world_size) if isinstance(self.strategy, MeshStrategy) else None
        except InputError:
            return None  # limits/mesh.py tells

    @property
    def num_steps(self) -> float | None:
        """Optimizer steps at most; inf where nothing ends training, None where epochs do: the data know how long."""
        if (steps := self.trainer.get("max_steps", -1)) >= 0:
            return steps
        epochs = self.trainer.get("max_epochs")
        if epochs is None:
            epochs = 1000 if self.trainer.get("max_time") is None else -1  # as Lightning has it
        return float("inf") if epochs == -1 else None
