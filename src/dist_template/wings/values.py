"""Values as text: of a configuration's keys, of paths; and the port of a training on this
machine."""

import json
import os
import random
import socket
from contextlib import suppress
from pathlib import Path

GIB = 2**30  # bytes
PORTS = range(20_000, 32_768)  # below those that kernels give to connections


def shown(value: object) -> str:
    """Returns a configuration's value as YAML writes it on one line."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str, ensure_ascii=False)


def free_port() -> int:
    """Returns a port of this machine for ranks to meet at: the kernel might give one of its own
    choice to any connection before rank 0 listens there."""
    ports = random.SystemRandom().sample(PORTS, len(PORTS))  # others in each process
    for port in ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"all ports from {min(ports)} to {max(ports)} are taken")


def short(file: str) -> str:
    """Returns the path below the working directory, or its last three parts if it is outside."""
    relative = os.path.relpath(file)
    return relative if not relative.startswith("..") else "/".join(Path(file).parts[-3:])
