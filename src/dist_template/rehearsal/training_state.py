"""Hashes the state of a training besides its weights, which a resumed training must restore."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

OF_LIGHTNING = set(vars(L.LightningModule())) | set(vars(Callback()))
NOT_TRAINING = {"eval_metrics", "metrics", "metric_buffer", "prepare_data_per_node"}
NOT_TRAINING |= {"allow_zero_length_dataloader_with_multiple_devices"}
MAX_ITEMS = 1000  # a larger container is data, not state


def optimizer_state(trainer: Any, module: nn.Module) -> dict[str, str]:
    """Returns {"parameter: field": hash of this rank's shard} of every optimizer."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, str] = {}
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"parameter {index}")
                fields = optimizer.state.get(parameter, {}) if hasattr(optimizer, "state") else {}
                found |= {f"{name}: {field}": _hash(value) or "" for field, value in fields.items()}
    return found


def learning_rates(trainer: Any) -> list[float]:
    """Returns the learning rate of every parameter group for the next step."""
    return [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]


def python_state(trainer: Any, module: nn.Module) -> dict[str, str]:
    """Returns {"NAME.attribute": hash} of attributes that are plain values, tensors, generators or containers of these.

    It covers the module, all its submodules and the user's callbacks, without parameters and buffers (checkpoints have
    them), and without the attributes of Lightning and of this library's callbacks.
    """
    callbacks = [callback for callback in trainer.callbacks if not _is_ours(callback)]
    owners = [*module.named_modules(), *((type(callback).__name__, callback) for callback in callbacks)]
    return {f"{name}.{key}".lstrip("."): value for name, owner in owners for key, value in _attributes(owner)}


def _is_ours(callback: Any) -> bool:
    library = __name__.split(".")[0]
    return type(callback).__module__.startswith((f"{library}.", "lightning."))


def _attributes(owner: Any) -> Iterator[tuple[str, str]]:
    for key, value in vars(owner).items():
        if key not in OF_LIGHTNING and key not in NOT_TRAINING:
            if (found := _hash(value)) is not None:
                yield key, found


def _hash(value: Any) -> str | None:
    """Returns a hash that starts with "tensor" if the value holds one; None if it is not a plain value."""
    if isinstance(value, Tensor):
        local: Tensor = (value.to_local() if isinstance(value, DTensor) else value).detach().cpu().contiguous()
        return f"tensor {_digest(local.reshape(-1).view(torch.uint8).numpy().tobytes())}" if not value.is_meta else None
    if isinstance(value, nn.Module):  # in a container or a callback; checkpoints have the module's own
        return _hash_of_items(list(value.state_dict().items()))
    if isinstance(value, torch.Generator):
        return f"generator {_digest(value.get_state().numpy().tobytes())}"
    if isinstance(value, random.Random | np.random.Generator):
        state = value.getstate() if isinstance(value, random.Random) else value.bit_generator.state
        return f"generator {_digest(repr(state).encode())}"
    if isinstance(value, np.ndarray):
        return f"array {_digest(value.tobytes())}"
    if isinstance(value, Mapping | list | tuple) or type(value).__name__ == "deque":
        return _hash_of_items(list(value.items()) if isinstance(value, Mapping) else list(value))
    return repr(value) if isinstance(value, bool | int | float | str | None | np.generic) else None


def _hash_of_items(items: list[Any]) -> str | None:
    parts = [_hash(item) for item in items] if len(items) <= MAX_ITEMS else [None]
    if any(part is None for part in parts):
        return None
    kind = "tensor" if any(part and part.startswith("tensor") for part in parts) else "container"
    return f"{kind} {_digest(repr(parts).encode())}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
