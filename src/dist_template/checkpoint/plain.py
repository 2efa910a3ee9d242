"""The format of one process and DDP: Lightning's dict in one file, written by torch.save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch.strategies import Strategy
from torch.utils.serialization import config

from ..errors import InputError
from .optimizer import by_name, is_by_name
from .protocol import Checkpoint, CheckpointFormat, Copy, Group, Opened, Shapes
from .untrusted import reading

FILE = "checkpoint.pt"  # the only file in a folder, besides the manifest
# Entries with the size of the weights; the third is the callback WeightAveraging's.
LARGE = ("state_dict", "optimizer_states", "current_model_state")
PINNED = {"save.use_pinned_memory_for_d2h": True}  # copies from a GPU to pageable memory are slow


class PlainFormat(CheckpointFormat[Strategy]):
    written_by = "one process or DDP"

    @staticmethod
    def header(path: Path, weights_only: bool | None) -> tuple[Checkpoint, Shapes]:
        checkpoint = _content(path, weights_only)
        shapes = {}
        for name, tensor in checkpoint["state_dict"].items():
            if isinstance(tensor, torch.Tensor):
                shapes[name] = tuple(tensor.shape)
        for key in LARGE:
            checkpoint.pop(key, None)
        return checkpoint, shapes

    @staticmethod
    def read(path: Path, optimizer: bool) -> Checkpoint:
        checkpoint = _content(path)
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

    def reads(self, opened: Opened) -> bool:
        return True

    def load(self, opened: Opened) -> Checkpoint:
        """Returns the full checkpoint on every rank; Lightning loads what is in it."""
        if opened.format is PlainFormat:
            return _content(opened.path, opened.weights_only, mmap=False)  # the file may be deleted
        return {"optimizer_states": [], **opened.format.read(opened.path, True)}


def _content(path: Path, weights_only: bool | None = None, mmap: bool = True) -> Checkpoint:
    """Returns Lightning's dict.

    Raises:
        InputError: it cannot be read, or has no weights.
    """
    file = path / FILE if path.is_dir() else path
    with reading(path, PlainFormat.written_by, trusted=weights_only is False):
        content = torch.load(file, "cpu", mmap=mmap, weights_only=weights_only)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise InputError(f"checkpoint {str(path)!r} has no `state_dict` of Lightning; give another")
    return content
