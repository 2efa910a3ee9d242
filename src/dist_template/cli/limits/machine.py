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
            num_gpus = torch.accelerator.device_count()
            gpus = f"{num_gpus} GPU(s)" if num_gpus else "no GPU(s)"
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
        if given.isdigit():
            devices = int(given)
        elif default is None:
            return cls.of(trainer)
        else:
            devices = max(default, 1)
        kind = trainer["accelerator"]
        kind = {"gpu": "cuda", "auto": "cuda"}.get(kind, kind)
        return cls(kind, devices, trainer["num_nodes"], _precision(trainer))


def _precision(trainer: Mapping[str, Any]) -> str:
    given = trainer.get("precision")
    if given is None:
        return "32-true"
    return _PRECISIONS.get(str(given), str(given))


def spec_in(trainer: Mapping[str, Any]) -> Spec:
    """Returns what the strategy of a Trainer's arguments says of itself."""
    given = trainer.get("strategy")
    return spec_of(given if given else "auto")


@dataclass(frozen=True)
class Setup(Configured):
    """The arguments of `limits.violations`."""

    @property
    def optim(self) -> OptimConfig | None:
        """model.optim; None for a module with another optimizer."""
        return typed_attribute(self.module, "optim", OptimConfig)

    @property
    def spec(self) -> Spec:
        return spec_in(self.trainer)

    @property
    def num_steps(self) -> float | None:
        """Maximum of optimizer steps: inf without an end, None if epochs end training."""
        steps = self.trainer.get("max_steps", -1)
        if steps >= 0:
            return steps
        epochs = self.trainer.get("max_epochs")
        if epochs is None and self.trainer.get("max_time") is not None:
            epochs = -1  # Lightning's default; without a max_time it is 1000
        return float("inf") if epochs == -1 else None
