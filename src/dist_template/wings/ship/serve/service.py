"""What a cluster asks a service: is it alive, is it ready, how much does it do.

    GET /health   200 as soon as the port listens: the process lives (liveness)
    GET /ready    200 when the model is loaded and compared; 503 before, and while it stops
    GET /metrics  Prometheus' text format

Other requests go to the application of the model; without one, or while stopping, they get 503."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, PlainTextResponse, Response

from .answers import CHAT, MODELS, SCORE, TEXT, error_response
from .metrics import MEDIA_TYPE, Metrics

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send
    from uvicorn import Server

    from .app import App

HEALTH, READY, METRICS = "/health", "/ready", "/metrics"
COUNTED = (CHAT, TEXT, SCORE, MODELS)  # labels; another path is "other", or labels would not end
CLOSED = 499  # nginx's code: the client closed the connection before there was a status
POLL_S = 0.05


def is_of_a_client(record: logging.LogRecord) -> bool:
    """Filters uvicorn's access log: False for the probes and the metrics."""
    if not isinstance(record.args, tuple):
        return True
    path = record.args[2]  # after the client's address and the method
    return path not in (HEALTH, READY, METRICS)


class Service:
    """ASGI application around `App`, which it gets when the model is loaded."""

    def __init__(self, max_requests: int) -> None:
        self.metrics = Metrics(max_requests)
        self._app: App | None = None
        self._is_stopping = False

    @property
    def is_ready(self) -> bool:
        return self._app is not None and not self._is_stopping

    @property
    def running(self) -> int:
        return self._app.running if self._app is not None else 0

    def start(self, app: App) -> None:
        """Answers requests by `app` from now on."""
        self._app = app

    def stop(self, server: Server, grace_s: float) -> None:
        """Refuses new requests, gives running ones `grace_s` seconds, then ends them at their next
        token and ends the server. Returns at once; the port listens until then, so that /ready
        answers 503 and not a refused connection."""
        self._is_stopping = True

        def drain() -> None:
            end = time.monotonic() + grace_s
            while self.running and time.monotonic() < end:
                time.sleep(POLL_S)
            if self._app is not None:
                self._app.stopping.set()
            server.should_exit = True

        threading.Thread(target=drain, daemon=True).start()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer = self._of_service(scope["path"])
        if answer is not None:
            return await answer(scope, receive, send)
        started, code = time.perf_counter(), 0

        async def counting(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        scope["tokens"] = tokens = dict[str, int]()  # App counts them here
        try:
            if self._app is None or self._is_stopping:
                why = "the server is stopping" if self._is_stopping else "the model is being loaded"
                refusal = error_response(503, f"{why}; try again later")
                await refusal(scope, receive, counting)
            else:
                await self._app(scope, receive, counting)
        except Exception:
            code = 500
            raise
        finally:
            path = scope["path"] if scope["path"] in COUNTED else "other"
            seconds = time.perf_counter() - started
            self.metrics.count(path, code if code else CLOSED, seconds, tokens)

    def _of_service(self, path: str) -> Response | None:
        """Returns the answer of the service itself; None if the path is the model's."""
        if path == HEALTH:
            return JSONResponse({"status": "ok"})
        if path == METRICS:
            text = self.metrics.text(self.is_ready, self.running)
            return PlainTextResponse(text, media_type=MEDIA_TYPE)
        if path == READY:
            if self.is_ready:
                return JSONResponse({"status": "ready"})
            status = "stopping" if self._is_stopping else "loading"
            return JSONResponse({"status": status}, 503)
        return None
