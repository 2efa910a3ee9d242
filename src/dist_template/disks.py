"""Disks that some ranks share: which ranks see a folder, and files that go to other disks."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from .processes import from_all_ranks, rank, world_size

CHUNK = 1 << 26  # bytes of a file that ranks exchange at once


def peers(folder: Path, group: dist.ProcessGroup | None = None) -> list[int]:
    """Returns the ranks that see the same `folder`, by a link in it that its first rank makes: all
    if it is shared, one node's if it is on the node's own disk. Collective over `group`."""
    if world_size(group) == 1:
        return [0]
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # a link, because its content is there at once
        (folder / ".disk").symlink_to(secrets.token_hex(8))
    of_ranks = from_all_ranks(os.readlink(folder / ".disk"), group)
    return [number for number, disk in enumerate(of_ranks) if disk == of_ranks[rank(group)]]


def pass_file(file: Path, size: int, source: int, is_wanted: bool) -> None:
    """Copies a file from the disk of the rank `source` to the disks of the ranks that want it.
    Collective."""
    for start in range(0, max(size, 1), CHUNK):
        box = [b""]
        if rank() == source:
            with file.open("rb") as stream:
                stream.seek(start)
                box = [stream.read(CHUNK)]
        dist.broadcast_object_list(box, src=source)
        if is_wanted:
            with file.open("ab" if start else "wb") as stream:
                stream.write(box[0])
