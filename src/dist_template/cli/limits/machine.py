"""What is known about a training before it starts. The machine need not be this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch

from ...errors import InputError, reason
from ...model.any_module import typed_attribute
from ...model.optim import OptimConfig
from ...parallel.configured import Configured, Hardware
from ...parallel.spec import Spec, spec_of

_PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


@dataclass(frozen=True)
class Machine(Hardware):
    """The hardware of a run, from the Trainer's keyword arguments."""

    @classmethod
    def of(cls, trainer: Mapping[str, Any]) -> Machine:
        """Returns this machine with the devices of a Trainer's arguments. Raises InputError if it
        lacks them."""
        keys = ("accelerator", "devices", "num_nodes")
        requested = {key: trainer[key] for key in keys if key in trainer}
        off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        try:  # Lightning resolves `auto` and what a scheduler has assigned
            found = L.Trainer(**requested, **off)
        except Exception as error:  # MisconfigurationException, ValueError or RuntimeError
            given = ", ".join(f"trainer.{key} {value!r}" for key, value in requested.items())
            gpus = f"{torch.accelerator.device_count() or 'no'} GPU(s)"
            why = reason(error).rstrip("!")
            sentence = f"{given}: this machine has {gpus}: {why}; edit one of these keys"
            raise InputError(sentence) from error
        accelerator = type(found.accelerator).name()
        return cls(accelerator, found.num_devices, found.num_nodes, _precision(trainer))

    @classmethod
    def described(cls, trainer: Mapping[str, Any], default: int | None = None) -> Machine:
        """Returns the machine of the real run; `auto` devices are `default`, or this machine's.
        Raises InputError if this machine lacks the devices."""
        given = str(trainer["devices"])
        if not given.isdigit() and default is None:
            return cls.of(trainer)
        devices = int(given) if given.isdigit() else default or 1
        kind = trainer["accelerator"]
        kind = {"gpu": "cuda", "auto": "cuda"}.get(kind, kind)
        return cls(kind, devices, trainer["num_nodes"], _precision(trainer))


def _precision(trainer: Mapping[str, Any]) -> str:
    given = str(trainer.get("precision") or "32-true")
    return _PRECISIONS.get(given, given)


@dataclass(frozen=True)
class Setup(Configured):
    """The arguments of `limits.violations`."""

    @property
    def optim(self) -> OptimConfig | None:
        """model.optim; None for a module with another optimizer."""
        return typed_attribute(self.module, "optim", OptimConfig)

    @property
    def spec(self) -> Spec:
        return spec_of(self.trainer.get("strategy") or "auto")

    @property
    def num_steps(self) -> float | None:
        """Maximum of optimizer steps: inf without an end, None if epochs end training."""
        if (steps := self.trainer.get("max_steps", -1)) >= 0:
            return steps
        epochs = self.trainer.get("max_epochs")
        if epochs is None:
            epochs = 1000 if self.trainer.get("max_time") is None else -1  # Lightning's defaults
        return float("inf") if epochs == -1 else None
