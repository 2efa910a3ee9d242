"""Opens checkpoints of any strategy, and loads each under any strategy (`--ckpt_path`).

    what a path holds           format         written by
    a file, or folder with one  PlainFormat    one process, DDP: torch.save of Lightning's dict
    folder with .metadata       ShardedFormat  MeshStrategy: torch's format, the rest in meta.pt
    folder with latest          ZeroFormat     ZeroStrategy: DeepSpeed's partitions with the rest

Lightning has two ways to load: by a CheckpointIO (single device, DDP), here `PlainFormat`, and by
the strategy itself (MeshStrategy, ZeroStrategy), here `StrategyFormat`. Lightning's and torch's
converters (`consolidate_checkpoint`, `dcp_to_torch_save`) read only the distributed format, and
unpickle without restrictions."""

import warnings
import zipfile
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.serialization import config

from .. import processes
from ..compat.torch import tree_map
from ..errors import InputError, first_line
from ..layout import full_shape
from ..plugins import LIBRARY, note
from ..progress import Progress
from .frozen import KEY, REFERENCE, exclude_frozen, restore_trainable
from .manifest import Needed, agreed
from .optimizer import ANEW, by_name, is_by_name, report_missing_moments, restore_groups
from .plain_types import back, plain
from .protocol import (
    Checkpoint,
    CheckpointFormat,
    Copy,
    Group,
    Opened,
    S,
    Shapes,
    State,
    registered_format,
    registered_formats,
)
from .stored import Mapped, Stored, copy_shard, copy_weights
from .untrusted import agreed_on_errors, check_entries, reading

__all__ = ["load_full"]

FILE = "checkpoint.pt"  # the only file in a folder, besides the manifest
# Entries with the size of the weights; the third is the callback WeightAveraging's.
LARGE = ("state_dict", "optimizer_states", "current_model_state")
PINNED = {"save.use_pinned_memory_for_d2h": True}  # copies from a GPU to pageable memory are slow


def format_of(path: Path) -> type[CheckpointFormat] | None:
    """Returns the format of a checkpoint; None if `path` is not one, or is incomplete."""
    file = path / FILE if path.is_dir() else path
    if file.is_file():
        return PlainFormat if zipfile.is_zipfile(file) else None
    for format in registered_formats().values():
        try:
            if format.is_at(path) is True:
                return format
        except Exception as error:  # another package's
            if format.__module__.partition(".")[0] == LIBRARY:
                raise
            note(f"{format.__module__}.{format.__name__} fails in is_at: {first_line(error)}")
    return None


def format_for(strategy: Strategy) -> CheckpointFormat:
    """Returns the format in which `strategy`, also one of Lightning's, writes."""
    return (registered_format(strategy) or PlainFormat)(strategy)


# ---- opening -------------------------------------------------------------------------------------


def verified(
    path: Path,
    module: L.LightningModule,
    is_strict: bool = True,
    weights_only: bool | None = None,
    needed: Needed | None = None,
) -> Opened:
    """Opens the checkpoint that all ranks load. Collective; rank 0 reads and compares.

    Args:
        path: A checkpoint, the file in one, or a folder of checkpoints, whose newest valid one is
            opened. A checkpoint of another library has no manifest to verify.
        module: The module to load it into, with its model.
        is_strict: Whether names and shapes of all weights must be the module's.
        weights_only: false lets a user's own classes be unpickled.
        needed: Which of its parts this rank reads; None: all.

    Raises:
        InputError: on all ranks, if it is damaged, incomplete or unreadable, was trained on another
            frozen base, or is another model's."""
    path = agreed(path, needed)
    shapes: Shapes = {}
    for of_rank in processes.distinct(_shapes(module.state_dict(keep_vars=True))).values():
        shapes |= of_rank  # in a pipeline, each rank has its stages'
    expected = shapes if is_strict else None
    opened = None
    with agreed_on_errors():
        if processes.is_rank_zero():
            opened = _opened(path, module, expected, weights_only)
    opened = cast(Opened, processes.broadcast(opened))
    of_data = type(getattr(module.trainer, "datamodule", None)).__qualname__
    if not isinstance(opened.metadata.get(of_data, {}), dict):
        raise InputError(f"checkpoint {str(path)!r} is damaged: its {of_data} is no state")
    opened.with_optimizer = reads_optimizer(module)
    return opened


def reads_optimizer(module: L.LightningModule) -> bool:
    """Returns whether training continues with a checkpoint's optimizer state."""
    return module.trainer.state.fn == TrainerFn.FITTING and not getattr(module, ANEW, False)


def read_full(
    path: str | Path, module: nn.Module | None = None, optimizer: bool = True
) -> Checkpoint:
    """Reads a checkpoint of any strategy in one process, with full (unsharded) tensors on the host.

    Call manifest.agreed before, which verifies the files.

    Args:
        path: The checkpoint.
        module: The module into which it is to be loaded. None: any.
        optimizer: false skips the optimizer's state, which needs twice the memory of the weights.

    Returns:
        Lightning's dict. "state_dict" holds the trained weights, in fp32 if the strategy keeps an
        fp32 copy.
        "optimizer_states" holds each optimizer's state by parameter name (optimizer.py), if the
        checkpoint has any.

    Raises InputError if `path` is no checkpoint, incomplete, unreadable, not data alone, or of
    another model than
    `module`."""
    expected = None
    if module is not None:
        expected = _shapes(module.state_dict(keep_vars=True))
    return _in_memory(_opened(Path(path), module, expected), optimizer)


@torch.no_grad()
def load_full(path: str | Path, module: nn.Module) -> dict[str, Any]:
    """Loads the weights of a checkpoint into `module`, on the host, one tensor at a time. Returns
    the stored tensors of those on the meta device, which are not loaded. Raises InputError as
    `read_full` does."""
    if getattr(module, KEY, None):
        exclude_frozen(module)
    targets = module.state_dict(keep_vars=True)
    shapes = _shapes(targets)
    opened = _opened(Path(path), module, shapes)
    with _reading(opened):
        stored = opened.format.read(opened.path, False)["state_dict"]
        for name in Progress(f"loading {opened.path.name}", "tensors", len(shapes)).over(shapes):
            if not targets[name].is_meta:
                copy_shard(targets[name], stored.pop(name))
    kept = {name: stored.pop(name) for name in shapes if name in stored}
    if stored:  # of a module's own: not tensors
        module.load_state_dict(back(stored), strict=False)
    return kept


def _reading(opened: Opened) -> AbstractContextManager[None]:
    return reading(opened.path, opened.format.written_by)


def _in_memory(opened: Opened, optimizer: bool) -> Checkpoint:
    """Returns what the format reads, with tensors in place of stored ones."""
    with _reading(opened):
        stored = opened.format.read(opened.path, optimizer)
        stored = tree_map(lambda value: value[...] if isinstance(value, Stored) else value, stored)
        return back(stored)


def _opened(
    path: Path, module: nn.Module | None, shapes: Shapes | None, weights_only: bool | None = None
) -> Opened:
    """Opens a checkpoint that was trained on `module`'s frozen base and has these shapes."""
    format = format_of(path)
    if format is None:
        raise InputError(f"{str(path)!r} is not a checkpoint, or is incomplete")
    metadata, saved = format.header(path, weights_only)
    check_entries(path, metadata)
    for key in (REFERENCE, KEY):
        then, now = metadata.get(key), getattr(module, key, None)
        if not then or not now or then["sha256"] == now["sha256"]:
            continue
        if then.get("of") != now["of"]:
            warnings.warn(
                f"{key} of checkpoint {str(path)!r} is not compared: an earlier version wrote it",
                stacklevel=2,
            )
            continue
        how = "with another reference model for data.source Preferences"
        if key == KEY:
            how = (
                f"on {then['name']} with SHA-256 {then['sha256'][:12]}, but {now['name']} has"
                f" {now['sha256'][:12]} now"
            )
        raise InputError(
            f"checkpoint {str(path)!r} was trained {how}: restore the run's model.pretrained, or"
            " its seed if only model.architecture is set"
        )
    if shapes is not None and saved != shapes:
        names = [name for name in saved | shapes if saved.get(name) != shapes.get(name)]
        here, there = shapes.get(names[0], "missing"), saved.get(names[0], "missing")
        raise InputError(
            f"checkpoint {str(path)!r} is another model's: its {names[0]} is {there}, here it is"
            f" {here} ({len(names)} such differences); give the --config list of its run"
        )
    return Opened(path, format, back(metadata), weights_only)


def _shapes(state_dict: Mapping[str, object]) -> Shapes:
    """Returns the unsharded shape of each tensor."""
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
    return {name: tuple(full_shape(tensor)) for name, tensor in tensors.items()}


# ---- loading -------------------------------------------------------------------------------------


class StrategyFormat(CheckpointFormat[S]):
    """The format of a strategy that loads checkpoints by itself."""

    def load(self, path: Path, weights_only: bool | None) -> Checkpoint:
        """Loads a checkpoint of any format into the strategy. Collective.

        If this format does not read it, every rank opens it and copies the slices that it needs,
        one tensor after the other, so that it holds its shard and a tensor. Optimizer state is
        loaded for training, if there is any.

        Returns:
            Lightning's entries other than weights and optimizer state.

        Raises InputError: see `verified`."""
        module = cast(L.LightningModule, self.strategy.lightning_module)
        opened = verified(path, module, weights_only=weights_only, needed=self.needed)
        if module.trainer.state.fn == TrainerFn.FITTING:  # before moments are created for them
            restore_trainable(module, opened.metadata)
            restore_groups(module, opened.metadata)
        if self.reads(opened):
            return self.load_own(opened)
        stored: Checkpoint = {}
        with agreed_on_errors(), _reading(opened):
            stored = opened.format.read(opened.path, opened.with_optimizer)
            copy_weights(module, stored["state_dict"])
            others = {
                name: back(value)
                for name, value in stored["state_dict"].items()
                if not hasattr(value, "shape")
            }
            if others:  # extra states
                module.load_state_dict(others, strict=False)
        if module.trainer.state.fn == TrainerFn.FITTING:
            states = stored.get("optimizer_states", []) if opened.with_optimizer else []
            if not states:
                report_missing_moments()
            with agreed_on_errors(), _reading(opened):
                self.set_optimizer_state(stored["state_dict"], states)
        return opened.metadata

    @abstractmethod
    def needed(self, path: Path, parts: set[str]) -> set[str]:
        """Returns the `parts` (manifest.PARTS) of a checkpoint that this rank reads; its other
        files are here."""

    @abstractmethod
    def reads(self, opened: Opened) -> bool:
        """Returns whether `load_own` reads it. Else every rank copies its slices of what `read`
        returns."""

    @abstractmethod
    def load_own(self, opened: Opened) -> Checkpoint:
        """Loads a checkpoint that it `reads`; returns Lightning's entries. Collective."""

    @abstractmethod
    def set_optimizer_state(self, stored_weights: Mapping[str, Any], states: list[State]) -> None:
        """Sets this rank's shards of each optimizer's state from `states`, whose tensors are
        stored. Collective."""


# ---- one file ------------------------------------------------------------------------------------


class PlainFormat(CheckpointFormat[Strategy], TorchCheckpointIO):
    """Lightning's dict in one file, and the CheckpointIO by which Lightning reads and writes it.

    Reads any format; writes into a folder if there is one."""

    written_by = "one process or DDP"

    @staticmethod
    def header(path: Path, weights_only: bool | None) -> tuple[Checkpoint, Shapes]:
        checkpoint = _content(path, weights_only)
        shapes = _shapes(checkpoint["state_dict"])
        for key in LARGE:
            checkpoint.pop(key, None)
        return checkpoint, shapes

    @staticmethod
    def read(path: Path, optimizer: bool) -> Checkpoint:
        checkpoint = _content(path)
        for key in ("state_dict", "optimizer_states"):
            checkpoint[key] = tree_map(_stored, checkpoint.get(key, []))
        names = checkpoint.get("parameter_names")
        states = checkpoint.pop("optimizer_states", [])
        if optimizer and states and is_by_name(states[0]):  # a user has saved read_full's result
            checkpoint["optimizer_states"] = states
        elif optimizer and states and names:
            pairs = zip(states, names, strict=True)
            checkpoint["optimizer_states"] = [by_name(state, known) for state, known in pairs]
        return checkpoint

    def save(self, checkpoint: Checkpoint, path: Path) -> None:
        # Lightning's way would copy it in memory, then to /tmp.
        with config.patch(PINNED):  # ty: ignore[missing-attribute]
            torch.save(checkpoint, path / FILE)

    def stage(self, checkpoint: Checkpoint, copy: Copy, group: Group) -> Callable[[Path], object]:
        if not self.strategy.is_global_zero:
            return lambda folder: None  # rank 0 has everything, and writes it
        copied = copy(checkpoint)
        return lambda folder: self.strategy.checkpoint_io.save_checkpoint(copied, folder)

    def load(self, path: Path, weights_only: bool | None) -> Checkpoint:
        """Returns the full checkpoint on every rank; Lightning loads what is in it."""
        module = cast(L.LightningModule, self.strategy.lightning_module)
        is_strict = module.strict_loading and not is_overridden("on_load_checkpoint", module)
        opened = verified(path, module, is_strict, weights_only)
        if opened.format is PlainFormat:
            content = _content(opened.path, opened.weights_only)
            # which Lightning copies; of the rest, the file may be deleted
            kept = content.pop("state_dict")
            content = tree_map(
                lambda value: value.clone() if isinstance(value, Tensor) else value, content
            )
            return back(content) | {"state_dict": back(kept)}
        return {"optimizer_states": [], **_in_memory(opened, opened.with_optimizer)}

    def save_checkpoint(
        self, checkpoint: Checkpoint, path: str | Path, storage_options: object = None
    ) -> None:
        if Path(path).is_dir():
            self.save(checkpoint, Path(path))
        else:
            super().save_checkpoint(plain(checkpoint), path, storage_options)

    def load_checkpoint(
        self, path: str | Path, map_location: object = None, weights_only: bool | None = None
    ) -> Checkpoint:
        return self.load(Path(path), weights_only)


def _stored(value: object) -> object:
    is_large = isinstance(value, Tensor) and value.ndim
    return Mapped(tuple(value.shape), value.dtype, value) if is_large else value


def _content(path: Path, weights_only: bool | None = None) -> Checkpoint:
    """Returns Lightning's dict; refuses a file without weights."""
    file = path / FILE if path.is_dir() else path
    with reading(path, PlainFormat.written_by, trusted=weights_only is False):
        content = torch.load(file, "cpu", mmap=True, weights_only=weights_only)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise InputError(f"checkpoint {str(path)!r} has no `state_dict` of Lightning; give another")
    for name, value in content["state_dict"].items():
        if isinstance(value, Tensor) and value.layout != torch.strided:
            raise InputError(
                f"checkpoint {str(path)!r} has {name} as {value.layout}: give one whose weights are"
                " dense"
            )
    try:
        tree_map(lambda value: value, content)
    except RecursionError as error:
        raise InputError(
            f"checkpoint {str(path)!r} is damaged: it contains itself, or has too many levels;"
            " give another"
        ) from error
    check_entries(path, content)
    return content


def use_every_format(strategy: Strategy) -> None:
    """Lets `strategy` read and write folders if it would use Lightning's single file."""
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = PlainFormat(strategy)
