"""Checkpoints of a model with adapters: what is trained, without the frozen base.

They have the names and formats of full checkpoints and work under the same strategies. The frozen
base is described by a hash instead, and another base is refused. Buffers are kept: training changes
some, such as the bias of a mixture's routers."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import processes

KEY = "frozen_base"  # in Lightning's dict, and the module's attribute
REFERENCE = "frozen_reference"  # likewise, of the copy that preferences are compared with
# What is hashed. Versions before 0.33 hashed all parameters in a row, and did not say so.
EACH = "each parameter"

CHANGED = "requires_grad_changed"  # in Lightning's dict: {name: what it is since it was changed}


def restore_trainable(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Freezes and unfreezes what a hook or a callback had frozen and unfrozen in the training that
    wrote the checkpoint. What the module's code says of other parameters, which may have been
    edited since, stays."""
    changed = checkpoint.get(CHANGED)
    if not changed:
        return
    for name, parameter in module.named_parameters():
        if name in changed:
            parameter.requires_grad_(changed[name])


class FrozenHash:
    """Hash of a model's frozen parameters; ranks may read any of them, in any order, at about 1 s
    per GB."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def add(self, name: str, parameter: Tensor) -> None:
        """Reads a full parameter in host memory."""
        values = parameter.detach().contiguous().reshape(-1).view(torch.uint8)
        self._digests[name] = hashlib.sha256(values.numpy()).hexdigest()

    def entry(self, name: str) -> dict[str, str]:
        """Returns what a checkpoint has of the model `name`. Collective."""
        digests: dict[str, str] = {}
        for of_rank in processes.from_all_ranks(self._digests):
            digests |= of_rank
        text = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
        return {"name": name, "sha256": hashlib.sha256(text.encode()).hexdigest(), "of": EACH}


def exclude_frozen(module: nn.Module, start: str = "") -> None:
    """Leaves frozen parameters out of `module`'s state dict; one without them can be loaded. With
    `start`, only parameters, and also buffers, whose names start with it."""

    def excluded(owner: nn.Module) -> set[str]:
        named = dict(owner.named_parameters(remove_duplicate=False))
        names = [name for name, parameter in named.items() if not parameter.requires_grad]
        if start:
            names += dict(owner.named_buffers(remove_duplicate=False))
        return {name for name in names if name.startswith(start)}

    def drop(owner: nn.Module, state: dict[str, Tensor], prefix: str, _: object) -> None:
        for name in excluded(owner):
            state.pop(prefix + name, None)

    def accept(owner: nn.Module, keys: Any) -> None:
        names = excluded(owner)
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in names]

    module.register_state_dict_post_hook(drop)
    module.register_load_state_dict_post_hook(accept)
