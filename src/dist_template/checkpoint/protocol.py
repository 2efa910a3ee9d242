"""Interface of a checkpoint format: how it reads, writes, copies and loads checkpoints.

formats.py (one file), sharded.py and zero.py have the three. A strategy holds the format that it
writes; formats.py knows all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from lightning.pytorch.strategies import Strategy

from .optimizer import State

Checkpoint = dict[str, Any]  # Lightning's dict; formats.read_full describes an unsharded one
Shapes = dict[str, tuple[int, ...]]  # of unsharded weights, by name
Copy = Callable[[Any], Any]  # copies the tensors in nested containers to host memory
Group = dist.ProcessGroup | None  # of the ranks that write; None: all
S = TypeVar("S", bound=Strategy)


@dataclass
class Opened:
    """A checkpoint that formats.verified has checked."""

    path: Path
    format: type[CheckpointFormat]
    metadata: Checkpoint  # without weights and optimizer state
    weights_only: bool | None  # False: classes of the user's own may be unpickled
    with_optimizer: bool = False  # whether training continues with its optimizer state


class CheckpointFormat(ABC, Generic[S]):
    """One format on the disk, and what the strategy that writes it does with it.

    `save`, `stage`, `load` and `set_optimizer_state` are collective.
    """

    written_by: str  # for messages
    of_lightning = ""  # Lightning's strategy that writes this format too

    def __init__(self, strategy: S) -> None:
        self.strategy = strategy

    @staticmethod
    def is_at(path: Path) -> bool:
        """Returns whether `path` holds a checkpoint of this format; for registered formats."""
        return False

    @staticmethod
    @abstractmethod
    def header(path: Path, weights_only: bool | None) -> tuple[Checkpoint, Shapes]:
        """Reads all but weights and optimizer state, and the shapes of the weights."""

    @staticmethod
    @abstractmethod
    def read(path: Path, optimizer: bool) -> Checkpoint:
        """Reads everything but the tensors with a dimension, in whose place are `stored.Stored` or memory-mapped
        tensors; else see formats.read_full. `formats.reading` catches the errors of reading them."""

    @abstractmethod
    def save(self, checkpoint: Checkpoint, path: Path) -> None:
        """Writes Lightning's `checkpoint` into the folder `path`."""

    @abstractmethod
    def stage(self, checkpoint: Checkpoint, copy: Copy, group: Group) -> Callable[[Path], object]:
        """Copies this rank's part; returns a function that writes the copy into a folder."""

    @abstractmethod
    def reads(self, opened: Opened) -> bool:
        """Returns whether `load` reads it. Else every rank copies its slices of what `read` returns."""

    @abstractmethod
    def load(self, opened: Opened) -> Checkpoint:
        """Loads a checkpoint that it `reads`; returns Lightning's entries."""

    def set_optimizer_state(self, stored_weights: Mapping[str, Any], states: list[State]) -> None:
        """Sets this rank's shards of each optimizer's state from `states`, whose tensors are stored ones."""
