"""A checkpoint into a strategy that did not write it: `--ckpt_path` takes any format under any strategy.

Weights, counters, schedules and the data's position always come along, optimizer state wherever both sides have it. Two
ways lead in, as Lightning has two: `EveryFormat` where a strategy reads files by a CheckpointIO (single device, DDP),
`load_foreign` where it loads for itself (MeshStrategy, ZeroStrategy).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from .. import weights
from ..errors import InputError
from ..layout import whole_shape
from . import zero
from .commit import agreed
from .formats import FILE, file_in, format_of, read_full, refuse_other_shapes, refusing_unreadable, state_dict_of
from .optimizer import State, groups_of, merge, tell_that_it_starts_anew, without_moments


class EveryFormat(TorchCheckpointIO):
    """Writes Lightning's one file, into a folder where there is one; reads any strategy's checkpoint.

    Args:
        module: The model that a checkpoint must fit. It is built before a checkpoint is read.
    """

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        self._module = module

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if Path(path).is_dir():
            torch.save(checkpoint, Path(path) / FILE)  # Lightning's would hold it in memory once more, then in /tmp
        else:
            super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        path = agreed(Path(path))
        if format_of(path) == "file":
            with refusing_unreadable(path):
                checkpoint = super().load_checkpoint(file_in(path), *args, **kwargs)
        else:
            checkpoint = {"optimizer_states": [], **read_full(path)}
        saved = state_dict_of(path, checkpoint)
        if self._module.strict_loading and not is_overridden("on_load_checkpoint", self._module):
            refuse_another_models(path, saved, self._module)
        return checkpoint


def use_every_format(trainer: Any, module: L.LightningModule) -> None:
    """Lets `trainer` read and write folders, where its strategy would write Lightning's single file."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = EveryFormat(module)


def is_zeros_own(path: Path, strategy: Any) -> bool:
    """Whether DeepSpeed itself can read `path`: it knows no other format, stage 3 or not, or number of ranks."""
    return format_of(path) == "zero" and zero.shape(path) == (strategy.zero_stage_3, strategy.world_size)


def load_foreign(strategy: Any, path: Path) -> dict[str, Any]:
    """Bring `path`, in whatever format, into the parts that `strategy`'s ranks hold; collective.

    Rank 0 reads it whole and the tensors go out one by one, so a node holds it once.

    Returns:
        The rest of Lightning's dict, on every rank.

    Raises:
        InputError: on every rank, it cannot be read or belongs to another model.
    """
    module = strategy.lightning_module
    full = _read_on_rank_zero(path, module)
    whole, states = full.pop("state_dict", {}), full.pop("optimizer_states", [])
    weights.load(module, whole)
    if module.trainer.state.fn == TrainerFn.FITTING:
        outlines = weights.broadcast([_outline(state) for state in states])
        if not outlines:
            tell_that_it_starts_anew()
        if hasattr(strategy, "deepspeed_engine"):
            _fill_zero(strategy, whole, outlines, states)
        else:
            _fill_mesh(strategy, outlines, states)
    return weights.broadcast(full)


def _read_on_rank_zero(path: Path, module: nn.Module) -> dict[str, Any]:
    full, wrong = {}, None
    if weights.is_rank_zero():
        try:
            full = read_full(path)
            refuse_another_models(path, full["state_dict"], module)
        except InputError as error:
            wrong = str(error)
    if wrong := weights.broadcast(wrong):  # or the other ranks would wait for ever
        raise InputError(wrong)
    return full


def refuse_another_models(path: Path, whole: dict[str, Tensor], module: nn.Module) -> None:
    """Compare names and shapes, before any tensor is copied.

    Raises:
        InputError: they differ.
    """
    tensors = {name: one for name, one in module.state_dict(keep_vars=True).items() if isinstance(one, Tensor)}
    saved = {name: tuple(one.shape) for name, one in whole.items() if isinstance(one, Tensor)}
    own = {name: tuple(whole_shape(tensor)) for name, tensor in tensors.items()}
    refuse_other_shapes(path, saved, own)


def _outline(state: State) -> State:
    """`state` for every rank: what is a tensor like its parameter is None, and follows by itself."""
    small = {
        name: {key: None if isinstance(value, Tensor) and value.ndim else value for key, value in values.items()}
        for name, values in state["state"].items()
    }
    return {"state": small, "param_groups": state["param_groups"]}


def _fill_mesh(strategy: Any, outlines: list[State], states: list[State]) -> None:
    """Every rank's part of each moment, placed as its parameter is."""
    for index, (optimizer, outline) in enumerate(zip(strategy.optimizers, outlines, strict=True)):
        groups = groups_of(strategy.lightning_module, optimizer)
        missing = without_moments(outline, groups)
        strategy.optimizer_state(optimizer)  # makes torch create the moments, which it does in the first step otherwise
        for names, group in zip(groups, optimizer.param_groups, strict=True):
            group.update(merge(outline, names, group))
            for name, parameter in zip(names, group["params"], strict=True):
                if name in missing:
                    optimizer.state.pop(parameter, None)
                    continue
                targets = optimizer.state[parameter]
                for key, value in outline["state"][name].items():
                    if value is not None:
                        targets[key].copy_(value)
                    else:
                        weights.copy_part(targets[key], states[index]["state"][name][key] if states else None)


def _fill_zero(strategy: Any, whole: dict[str, Tensor], outlines: list[State], states: list[State]) -> None:
    """Every rank's partition of the fp32 weights and of each moment."""
    target = zero.Target(strategy.deepspeed_engine, strategy.lightning_module)
    for name in target.parameters:
        target.set(name, None, whole.get(name))
    for outline in outlines:
        target.make_state(outline)
        for name in target.parameters:
            for key in (key for key, value in outline["state"].get(name, {}).items() if value is None):
                target.set(name, key, states[0]["state"][name][key] if states else None)
