"""Who may ask, and how much may be sent: checked before a request takes one of the slots."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from starlette.types import Receive

MOST_BYTES = 1 << 20  # of a body: tokens of more take seconds
BODY_S = 20.0  # for a body to arrive
ONCE = (b"authorization", b"origin", b"host")  # of two values, a proxy may have read the other
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]*)(?::\d*)?", re.ASCII)


class Admission:
    """Refuses requests by their headers.

    With a key, requests have to present it. Without one, any page that a user's browser shows could
    ask the model: a page's requests have its Origin, which has to be allowed or the service's own.
    A page can also have its own name resolve to this machine (DNS rebinding), and is of the same
    origin then: so the Host has to be an address, a name without a dot, which nobody can register,
    this machine's name, or allowed.
    """

    def __init__(self, key: str, origins: Collection[str], hosts: Collection[str]) -> None:
        self._bearer = f"Bearer {key}".encode() if key else b""
        self._origins = {origin.rstrip("/") for origin in origins}
        self._hosts = {host.lower() for host in hosts}
        self._hosts.add(socket.gethostname().lower())

    def check(self, given: Sequence[tuple[bytes, bytes]]) -> None:
        """Raises HTTPException with 400, 401, 403, 413 or 415."""
        headers, names = dict(given), [name for name, _ in given]
        for name in ONCE:
            if names.count(name) > 1:
                raise HTTPException(400, f"the header {name.decode()} is given twice: send one")
        if self._bearer:
            if not hmac.compare_digest(self._bearer, headers.get(b"authorization", b"")):
                raise HTTPException(401, "the API key is missing or wrong")
        else:
            self._check_page(headers)
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding.lower() != "identity":
            raise HTTPException(415, f"Content-Encoding {encoding[:50]!r}: send the body as it is")
        if b"content-length" in headers and b"transfer-encoding" in headers:
            raise HTTPException(400, "Content-Length beside Transfer-Encoding: send one of them")
        length = headers.get(b"content-length", b"0")
        if len(length) > 20 or int(length) > MOST_BYTES:  # h11 has checked that it is a number
            raise _too_large()

    def _check_page(self, headers: Mapping[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1").lower()
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        name = _name(host)
        if not _is_unregistrable(name) and not self._hosts & {name, host, "*"}:
            why = f"Host {host[:100]!r} is not this service's: serve with --allow_host or a key"
            raise HTTPException(403, why)
        is_own = origin in (f"http://{host}", f"https://{host}")
        if origin and not is_own and not self._origins & {origin, "*"}:
            why = f"Origin {origin[:100]!r} may not ask: serve with --allow_origin or a key"
            raise HTTPException(403, why)


async def body_of(receive: Receive) -> bytes | None:
    """Returns a request's body; None where its client has left. Raises HTTPException with 413 as
    soon as it is too large, and with 408 where it does not arrive in time."""

    async def read() -> bytes | None:
        content = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            content += message.get("body", b"")
            if len(content) > MOST_BYTES:
                raise _too_large()
            if not message.get("more_body", False):
                return bytes(content)

    try:
        return await asyncio.wait_for(read(), BODY_S)
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {BODY_S:g} s") from None


def _too_large() -> HTTPException:
    return HTTPException(413, f"the body has over {MOST_BYTES} bytes")


def _name(host: str) -> str:
    """Returns the name in a Host, without its port; "." if it is not valid, as `a@b` or `[`."""
    found = HOST.fullmatch(host)
    if found is None:
        return "."
    return found[1].strip("[]")


def _is_unregistrable(name: str) -> bool:
    """Whether no stranger can have `name` resolve to this machine; "" is a client without Host,
    which is no browser."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(".localhost")
    return True
