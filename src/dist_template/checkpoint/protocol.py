"""Interface of a checkpoint format: how it reads, writes, copies and loads checkpoints.

formats.py has the one of a single file; a strategy with a format of its own has it beside it, and
does not import it: the strategy's Spec names both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch.distributed.checkpoint.state_dict import StateDictOptions

from ..plugins import STRATEGIES, loaded_parts

Checkpoint = dict[str, Any]  # Lightning's dict; formats.read_full describes an unsharded one
Shapes = dict[str, tuple[int, ...]]  # of unsharded weights, by name
Copy = Callable[[Any], Any]  # copies the tensors in nested containers to host memory
State = dict[str, Any]  # of an optimizer, by parameter name: optimizer.py
Group = dist.ProcessGroup | None  # of the ranks that write; None: all
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # parameter groups differ between meshes
S = TypeVar("S", bound=Strategy)


def registered_format(strategy: Strategy) -> type[CheckpointFormat] | None:
    """Returns the format of a strategy's class, or of the class of Lightning's that writes the
    same; None: one file."""
    names = {kind.__name__ for kind in type(strategy).__mro__}
    for name, each in registered_formats().items():
        if not names.isdisjoint({name, each.of_lightning}):
            return each
    return None


def registered_formats() -> dict[str, type[CheckpointFormat]]:
    """Returns the formats by the names of strategies' classes."""
    return loaded_parts(STRATEGIES, "format_class", is_format)


def is_format(value: object) -> bool:
    """a subclass of dist_template.checkpoint.protocol.CheckpointFormat"""
    return isinstance(value, type) and issubclass(value, CheckpointFormat)


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

    `save`, `stage` and `load` are collective."""

    written_by: str  # for messages
    of_lightning = ""  # Lightning's strategy that writes this format too

    def __init__(self, strategy: S) -> None:
        self.strategy = strategy

    @staticmethod
    def is_at(path: Path) -> bool:
        """Returns whether `path` holds a checkpoint of this format, if a strategy writes it."""
        return False

    @staticmethod
    @abstractmethod
    def header(path: Path, weights_only: bool | None) -> tuple[Checkpoint, Shapes]:
        """Reads all but weights and optimizer state, and the shapes of the weights."""

    @staticmethod
    @abstractmethod
    def read(path: Path, optimizer: bool) -> Checkpoint:
        """Reads everything but the tensors with a dimension, in whose place are `stored.Stored` or
        memory-mapped tensors; else see formats.read_full. `formats.reading` catches the errors of
        reading them."""

    @abstractmethod
    def save(self, checkpoint: Checkpoint, path: Path) -> None:
        """Writes Lightning's `checkpoint` into the folder `path`."""

    @abstractmethod
    def stage(self, checkpoint: Checkpoint, copy: Copy, group: Group) -> Callable[[Path], object]:
        """Copies this rank's part; returns a function that writes the copy into a folder."""

    @abstractmethod
    def load(self, path: Path, weights_only: bool | None) -> Checkpoint:
        """Loads a checkpoint of any format into the strategy; see formats.StrategyFormat."""
