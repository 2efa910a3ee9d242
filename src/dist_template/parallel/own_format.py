"""Saves and loads checkpoints of a strategy in which every rank writes its part."""

from functools import cached_property
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy

from .. import processes
from ..checkpoint.plain_types import plain
from ..checkpoint.protocol import Checkpoint, CheckpointFormat, registered_format


class OwnFormat(Strategy):
    """A strategy whose class has a format of its own; entry points name it, because formats know
    strategies."""

    @cached_property
    def format(self) -> CheckpointFormat[Any]:
        kind = registered_format(self)
        assert kind is not None, (
            f"no entry point names a checkpoint format for {type(self).__name__}"
        )
        return kind(self)

    def save_checkpoint(
        self, checkpoint: Checkpoint, filepath: str | Path, storage_options: object = None
    ) -> None:
        self.format.save(plain(checkpoint), Path(processes.broadcast(str(filepath))))

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> Checkpoint:
        return self.format.load(Path(checkpoint_path), weights_only)
