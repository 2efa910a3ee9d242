"""Loads a checkpoint of any format under any strategy (`--ckpt_path`).

Weights, counters, schedules and the position in the data are always loaded, optimizer state if both
strategies have it. Lightning has two ways to load, and so has this file: `EveryFormat` for
strategies that read files by a CheckpointIO (single device, DDP), and `load_foreign` for those that
load by themselves (MeshStrategy, ZeroStrategy)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.serialization import config

from .. import weights
from ..errors import InputError
from . import zero
from .commit import agreed
from .formats import (
    FILE,
    file_in,
    format_of,
    of_all_stages,
    read_full,
    refuse_another_models,
    refuse_other_shapes,
    refusing_unreadable,
    shapes,
    state_dict_of,
)
from .frozen import refuse_another_base
from .optimizer import ANEW, State, groups_of, merge, report_missing_moments, without_moments

PINNED = {"save.use_pinned_memory_for_d2h": True}  # copies from a GPU to pageable memory are slow


class EveryFormat(TorchCheckpointIO):
    """Writes Lightning's single file, into a folder if there is one; reads any format.

    Args:
        module: The module that a checkpoint must fit. It is built before a checkpoint is read.
    """

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        self._module = module

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        if Path(path).is_dir():
            # Lightning's way would copy it in memory, then to /tmp.
            with config.patch(PINNED):  # ty: ignore[missing-attribute]
                torch.save(checkpoint, Path(path) / FILE)
        else:
            super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        path = agreed(Path(path))
        if format_of(path) == "file":
            with refusing_unreadable(path):
                checkpoint = super().load_checkpoint(file_in(path), *args, **kwargs)
            state_dict_of(path, checkpoint)
        else:
            checkpoint = {"optimizer_states": [], **read_full(path)}
        refuse_another_base(path, checkpoint, self._module)
        if self._module.strict_loading and not is_overridden("on_load_checkpoint", self._module):
            refuse_another_models(path, checkpoint, self._module)
        return checkpoint


def use_every_format(trainer: Any, module: L.LightningModule) -> None:
    """Lets `trainer` read and write folders if its strategy would use Lightning's single file."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = EveryFormat(module)


def is_readable_by_deepspeed(path: Path, strategy: Any) -> bool:
    """Returns whether `path` has the strategy's stage (3 or not) and number of ranks."""
    own = (strategy.zero_stage_3, strategy.world_size)
    is_read = not getattr(strategy.lightning_module, ANEW, False)
    return is_read and format_of(path) == "zero" and zero.shape(path) == own


def load_foreign(strategy: Any, path: Path) -> dict[str, Any]:
    """Loads a checkpoint of any format into the shards of all ranks. Collective.

    Rank 0 reads it and sends the tensors one by one, so that only one process holds all of it.

    Returns:
        The rest of Lightning's dict, on every rank.

    Raises:
        InputError: on every rank, if it cannot be read or is another model's.
    """
    module = strategy.lightning_module
    full = _read_on_rank_zero(path, strategy)
    state_dict, states = full.pop("state_dict", {}), full.pop("optimizer_states", [])
    if getattr(module, ANEW, False):
        states = []
    weights.load(module, state_dict)
    if module.trainer.state.fn == TrainerFn.FITTING:
        outlines = weights.broadcast([_outline(state) for state in states])
        if not outlines:
            report_missing_moments()
        if hasattr(strategy, "deepspeed_engine"):
            _fill_zero(strategy, state_dict, outlines, states)
        elif outlines:
            _fill_mesh(strategy, outlines, states)
    return weights.broadcast(full)


def _read_on_rank_zero(path: Path, strategy: Any) -> dict[str, Any]:
    full, refusal = {}, None
    own = shapes(strategy.lightning_module.state_dict(keep_vars=True))
    if getattr(strategy, "pipeline", None):
        own = of_all_stages(own)
    if weights.is_rank_zero():
        try:
            full = read_full(path)
            refuse_another_base(path, full, strategy.lightning_module)
            refuse_other_shapes(path, shapes(state_dict_of(path, full)), own)
        except InputError as error:
            refusal = str(error)
    if refusal := weights.broadcast(refusal):  # else the other ranks would wait forever
        raise InputError(refusal)
    return full


def _outline(state: State) -> State:
    """Returns `state` with the outline of each tensor that is no scalar, which is sent later."""
    small: dict[str, dict[str, Any]] = {}
    for name, values in state["state"].items():
        small[name] = {}
        for key, value in values.items():
            is_sent = isinstance(value, Tensor) and value.ndim
            small[name][key] = weights.outline(value) if is_sent else value
    return {"state": small, "param_groups": state["param_groups"]}


def _fill_mesh(strategy: Any, outlines: list[State], states: list[State]) -> None:
    """Sets every rank's shard of each moment."""
    for index, (optimizer, outline) in enumerate(zip(strategy.optimizers, outlines, strict=True)):
        groups = groups_of(strategy.lightning_module, optimizer)
        missing = without_moments(outline, groups)
        strategy.optimizer_state(optimizer)  # creates the moments, as torch does in the first step
        own: dict[str, nn.Parameter] = {}  # in a pipeline, of this stage
        for names, group in zip(groups, optimizer.param_groups, strict=True):
            group.update(merge(outline, names, group))
            own |= zip(names, group["params"], strict=True)
        for name in missing:
            optimizer.state.pop(own[name], None)
        for name, values in outline["state"].items():
            full = states[index]["state"][name] if states else {}  # on rank 0
            for key, value in values.items():
                target = optimizer.state[own[name]][key] if name in own else None
                if _is_outline(value):
                    weights.copy_part(target, full.get(key), value)
                elif target is not None:
                    target.copy_(value)


def _is_outline(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _fill_zero(
    strategy: Any, state_dict: dict[str, Tensor], outlines: list[State], states: list[State]
) -> None:
    """Sets every rank's partition of the fp32 weights and of each moment."""
    target = zero.Target(strategy.deepspeed_engine, strategy.lightning_module)
    for name in target.parameters:
        target.set(name, None, state_dict.get(name))
    for outline in outlines:
        target.make_state(outline)
        for name in target.parameters:
            full = states[0]["state"].get(name, {}) if states else {}  # on rank 0
            for key, value in outline["state"].get(name, {}).items():
                if _is_outline(value):
                    target.set(name, key, full.get(key))
