"""uvicorn's HTTP protocol with deadlines. Verified on uvicorn 0.54 and h11 0.16.

uvicorn waits for ever for a request's head, for the rest of a body that was answered early, and for
a client that does not read; its keep-alive timer covers idle connections alone. The classes of
`uvicorn.protocols` have no underscore, and no documentation promises them; `uvicorn.Config(http=…)`
takes a subclass. Where a name is gone, `serve` does not start. tests/wings/test_serve_attacked.py
attacks it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from . import wrap_method

HEAD_S = 10.0  # from the connection, or a later request's first byte, to the end of its headers
REST_S = 2.0  # for the rest of a body whose request is answered already: a refusal is read
REST_BYTES = 16 << 20  # of that rest: h11 parses it, and a fast client sends 400 MB in REST_S
WRITE_S = 30.0  # for a client that does not read its answer
MOST_CHUNKS = 20_000  # of a body: h11 takes 20 us for one, and a body may have 1 MiB of them
MOST_CONNECTIONS = 512  # at once; below the 1024 open files that a process usually may have


class TimedProtocol(H11Protocol):
    """One connection: closed at its deadline; a malformed request gets a 4xx and a sentence."""

    _deadline: asyncio.TimerHandle | None = None
    _write_deadline: asyncio.TimerHandle | None = None
    _waits_for: object = None  # the state that `_deadline` belongs to
    _has_partial_head = False
    _num_chunks = 0
    _rest_bytes = 0
    _is_refused = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        wrap_method(self.conn, "next_event", self._counted)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._is_refused:
            return
        self._has_partial_head = True
        if self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
            self._rest_bytes += len(data)
            if self._rest_bytes > REST_BYTES:
                self.transport.close()
                return
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        self._has_partial_head = False  # uvicorn's keep-alive timer covers the time until the next
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_deadline = self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answers a malformed request, unless an answer has begun, and closes the connection."""
        error = sys.exc_info()[1]  # uvicorn calls this where it has caught h11's error
        is_large = getattr(error, "error_status_hint", 400) == 431
        self._refuse(431 if is_large else 400, f"the request is not valid HTTP: {error or msg}")

    def _counted(self, method: Any) -> Any:
        event = method()
        if isinstance(event, h11.Request):
            self._num_chunks = self._rest_bytes = 0
        self._num_chunks += isinstance(event, h11.Data)
        if self._num_chunks > MOST_CHUNKS:
            raise h11.RemoteProtocolError(f"the body has over {MOST_CHUNKS} chunks")
        return event

    def _watch(self) -> None:
        """Starts the deadline of the state that the connection is in, or ends it."""
        theirs, is_answered = self.conn.their_state, self.conn.our_state is h11.DONE
        if theirs is h11.IDLE and (self._has_partial_head or self.cycle is None):
            seconds = HEAD_S
        elif theirs is h11.SEND_BODY and is_answered:
            seconds = REST_S
        else:  # the application has a deadline for the body, and none for its answer
            return self._cancel()
        if self._waits_for is not theirs:
            self._cancel()
            self._waits_for = theirs
            self._deadline = self.loop.call_later(seconds, self._expire)
        return None

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._waits_for = None

    def _expire(self) -> None:
        if self._waits_for is h11.IDLE and self._has_partial_head:
            self._refuse(408, f"the headers did not end within {HEAD_S:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, sentence: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The application's answer would follow this one, which h11 refuses with an error.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = {"message": sentence, "type": "invalid_request_error", "code": status}
            body = json.dumps({"error": error}).encode()
            headers = [("content-type", "application/json"), ("connection", "close")]
            headers.append(("content-length", str(len(body))))
            answer = h11.Response(status_code=status, headers=headers, reason=b"")
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._cancel()
        # A socket that is closed with data unread is reset, and the refusal lost with it.
        self._is_refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline = self.loop.call_later(REST_S, self.transport.close)

    def eof_received(self) -> None:
        if self._is_refused:
            self.transport.close()
