"""Which ranks see the same folder of checkpoints: all of them on a shared disk, one node's ranks on its own disk.

A small file in the folder identifies the disk. It is asked for only if checkpoints are uploaded to a store: without
one, the folder must be shared."""

import contextlib
import os
import secrets
from pathlib import Path

from .. import weights
from .protocol import Group

FILE = ".disk"


def peers(folder: Path, group: Group = None) -> list[int]:
    """Returns the ranks of `group` that see the same `folder`, in order; it is created. Collective in `group`."""
    if weights.world_size(group) == 1:
        return [0]
    own = _identity(folder)
    return [rank for rank, other in enumerate(weights.from_all_ranks(own, group)) if other == own]


def _identity(folder: Path) -> str:
    """Returns the content of FILE, which the first rank writes: hard links are created by one rank only, on network
    file systems too."""
    file = folder / FILE
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        own = folder / f"{FILE}-{secrets.token_hex(8)}"
        own.write_text(own.name, encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(own, file)
        own.unlink()
    return file.read_text(encoding="utf-8")
