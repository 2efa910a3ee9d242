"""Reads a hostfile: the nodes of a run in the format of the deepspeed launcher.

    # a rack
    node1 slots=8
    node2 slots=8

A slot is a device. `include` and `exclude` have that launcher's own syntax and are read by its own
function."""

import re
from collections.abc import Callable
from pathlib import Path

from ..errors import InputError, reason, require
from ..records import read_text

LINE = re.compile(r"(\S+)\s+slots=([1-9]\d*)")


def read(path: str, check_name: Callable[[str], None]) -> dict[str, int]:
    """Returns the number of slots of each host, in the order of the file. Raises InputError for a
    file that cannot be read, a wrong line, a host that is there twice, and without a host;
    `check_name` raises it for a wrong name."""
    found: dict[str, int] = {}
    where = f"cluster.hostfile {path}"
    try:
        lines = read_text(Path(path)).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where} cannot be read: {reason(error)}") from error
    for number, text in enumerate(lines, 1):
        line = text.partition("#")[0].strip()
        if not line:
            continue
        known = LINE.fullmatch(line)
        if known is None:
            raise InputError(
                f"{where}, line {number} is {line!r}: write `name slots=N`, the number of devices"
            )
        name, slots = known.groups()
        check_name(name)
        if name in found:
            raise InputError(f"{where}, line {number} has {name} a second time: remove one line")
        found[name] = int(slots)
    if not found:
        raise InputError(f"{where} names no host: write a line `name slots=N` for each")
    return found


def chosen(slots: dict[str, int], include: str, exclude: str) -> dict[str, list[int]]:
    """Returns the hosts that `include` or `exclude` leave, with the slots to use: their numbers, as
    CUDA_VISIBLE_DEVICES has them. Raises InputError for a host or a slot that the file does not
    have."""
    if not include and not exclude:
        return {host: list(range(count)) for host, count in slots.items()}
    require("deepspeed", "cluster.include")
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    try:
        active = parse_inclusion_exclusion(dict(slots), include, exclude)
    except ValueError as error:
        raise InputError(f"cluster.include or cluster.exclude: {reason(error)}") from error
    if not active:
        raise InputError(f"cluster.exclude {exclude!r} leaves no host of cluster.hostfile")
    return {host: list(used) for host, used in active.items()}
