"""Names of the Hugging Face hub, where it can be reached and where it cannot.

huggingface_hub asks again for a minute where there is no network, and prints two lines each time.
Here its host is asked once; if that fails, it is in offline mode for this process and those that it
starts: names are then read from the hub's cache, or refused at once.
"""

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from .errors import reason

__all__ = ["check_reachable", "why_not_loaded"]

TIMEOUT_S = 5.0
OFFLINE = "HF_HUB_OFFLINE"
_unreachable: list[str] = []  # why the host could not be reached, once it was asked
_asked: set[str] = set()


def check_reachable(name: str) -> None:
    """Turns huggingface_hub's offline mode on if `name` is no local folder and the hub's host
    cannot be reached. Behind a proxy, or in offline mode, nothing is asked."""
    if Path(name).exists() or os.environ.get(OFFLINE) or getproxies():
        return
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    host, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    if host in _asked:
        return
    _asked.add(host)
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_S).close()
    except OSError as error:
        _unreachable.append(f"{host} cannot be reached ({reason(error)})")
        constants.HF_HUB_OFFLINE = True
        os.environ[OFFLINE] = "1"


def why_not_loaded(name: str, error: BaseException, options: str = "") -> str:
    """Returns why `name` could not be loaded: the error's reason; where the hub cannot be reached,
    that and how to use a local folder. `options`: of `hf download`, such as for a data set."""
    if not _unreachable or Path(name).exists():
        return reason(error)
    command = f"hf download {name}{options} --local-dir FOLDER"
    return (
        f"{_unreachable[-1]}, and its cache has no copy; give a local folder instead of the name"
        f" (`{command}` on a machine with a network writes one)"
    )
