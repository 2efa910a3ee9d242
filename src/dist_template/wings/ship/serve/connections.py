"""uvicorn's connections, with a limit on the time for a request's header."""

from __future__ import annotations

import asyncio
from typing import Any

HEADER_S = 10.0  # seconds for a header, from the connection or the end of the answer before it


def protocol() -> Any:
    """Returns a class of connections; uvicorn comes with the extra."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        """Closes a connection that does not finish a request's header in time.

        uvicorn 0.54 has a limit for connections that send nothing after an answer, and none here.
        """

        deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.limit_header()

        def on_response_complete(self) -> None:
            self.limit_header()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self.deadline:
                self.deadline.cancel()

        def limit_header(self) -> None:
            """Starts the time for the next header."""
            if self.deadline:
                self.deadline.cancel()
            self.deadline = self.loop.call_later(HEADER_S, self.close_without_header)

        def close_without_header(self) -> None:
            """Closes the connection, unless a request is being read or answered."""
            if self.conn.their_state is h11.IDLE:
                self.transport.close()

    return Protocol
