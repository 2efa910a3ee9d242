"""What a checkpoint format answers for: how it is recognised, read, written, copied and loaded.

plain.py, sharded.py and zero.py are the three formats. A strategy holds the format that it writes;
formats.py knows all three."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import lightning as L
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from ..layout import full_shape
from .optimizer import State

Checkpoint = dict[str, Any]  # Lightning's dict; formats.read_full describes an unsharded one
Shapes = dict[str, tuple[int, ...]]  # of unsharded weights, by name
S = TypeVar("S", bound=Strategy)
Copy = Callable[[Any], Any]  # copies the tensors in nested containers to host memory


def shapes_of(state_dict: Mapping[str, object]) -> Shapes:
    """Returns the unsharded shape of each tensor."""
    tensors = {}
    for name, value in state_dict.items():
        if isinstance(value, Tensor):
            tensors[name] = tuple(full_shape(value))
    return tensors


@dataclass
class Opened:
    """A checkpoint whose format, frozen base and shapes were checked (formats.verified)."""

    path: Path
    format: type[CheckpointFormat]
    metadata: Checkpoint  # without weights and optimizer state
    weights_only: bool | None  # False: classes of the user's own may be unpickled


class CheckpointFormat(ABC, Generic[S]):
    """One format on the disk, and what the strategy that writes it does with it."""

    written_by: str  # for messages

    def __init__(self, strategy: S) -> None:
        self.strategy = strategy

    @property
    def module(self) -> L.LightningModule:
        return cast(L.LightningModule, self.strategy.lightning_module)

    @staticmethod
    @abstractmethod
    def is_at(path: Path) -> bool:
        """Returns whether `path` is a checkpoint of this format, with all of its parts."""

    @staticmethod
    @abstractmethod
    def header(path: Path, weights_only: bool | None) -> tuple[Checkpoint, Shapes]:
        """Reads the entries other than weights and optimizer state, and the weights' shapes.

        `weights_only=False` lets a user's own classes be unpickled.
        """

    @staticmethod
    @abstractmethod
    def read(path: Path, optimizer: bool) -> Checkpoint:
        """Reads everything, with unsharded tensors on the host; see formats.read_full."""

    @abstractmethod
    def save(self, checkpoint: Checkpoint, path: Path) -> None:
        """Writes Lightning's `checkpoint` into the folder `path`. Collective."""

    @abstractmethod
    def stage(
        self, checkpoint: Checkpoint, copy: Copy, group: dist.ProcessGroup | None
    ) -> Callable[[Path], object]:
        """Copies this rank's part of `checkpoint` with `copy`. Collective.

        Returns a function that writes the copy into a folder; its collectives are in `group`.
        """

    @abstractmethod
    def reads(self, opened: Opened) -> bool:
        """Returns whether `load` reads this checkpoint. Otherwise rank 0 reads it and sends the
        full tensors: weights by scatter.load_weights, moments by `set_optimizer_state`."""

    @abstractmethod
    def load(self, opened: Opened) -> Checkpoint:
        """Loads a checkpoint that it `reads`; returns Lightning's entries. Collective."""

    def set_optimizer_state(
        self, full_weights: Mapping[str, Tensor], meta_states: list[State], states: list[State]
    ) -> None:
        """Sets every rank's shards of optimizer state. Collective.

        Args:
            full_weights: The full weights, on rank 0; {} on other ranks.
            meta_states: The state of each optimizer, with tensors on the meta device.
            states: The same with values, on rank 0; [] on other ranks.
        """
