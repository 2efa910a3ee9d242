"""One model behind OpenAI's API, with a key, limits, time-outs, health, metrics and a log."""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from ....compat.transformers_serving import OneModel
from ....errors import shortened
from .requests import CHAT, SHOWN, TEXT, checked

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BODY_S = 10.0  # seconds for a client to send its request
GONE = 499  # nginx's code in the log: the client closed the connection before the answer's end
LOGGED = 4000  # most characters of a request in the log
MODELS, HEALTH, READY, METRICS = "/v1/models", "/health", "/ready", "/metrics"
METHODS = {CHAT: "POST", TEXT: "POST"} | dict.fromkeys((MODELS, HEALTH, READY, METRICS), "GET")
BEFORE = 8  # further tokens that are decoded: a decoder may strip the first one's space
CLOSE, RETRY = {"connection": "close"}, {"retry-after": "2"}
HEADERS = {401: {"www-authenticate": "Bearer"}, 408: CLOSE, 413: CLOSE, 429: RETRY, 503: RETRY}


class App:
    """An ASGI application.

    Args:
        key: Requests have to present it; "": none is needed.
        given: The verb's flags, and `context`, the number of the model's positions.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, key: str,
        given: argparse.Namespace,
    ) -> None:  # fmt: skip
        self._model, self._tokenizer = model, tokenizer
        self._served = OneModel(model, tokenizer, given.name)
        self.given, self.is_ready = given, False
        given.token_bytes = max(len(token.encode()) for token in tokenizer.get_vocab())
        self._bearer = f"Bearer {key}".encode() if key else b""
        self._running: dict[str, asyncio.Timeout] = {}
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("serve_requests", "Requests", ["path", "code"], registry=registry)
        self._seconds = Histogram("serve_seconds", "Seconds to an answer's end", registry=registry)
        self._tokens = Counter("serve_tokens", "Tokens", ["kind"], registry=registry)
        in_flight = Gauge("serve_in_flight", "Requests that are being answered", registry=registry)
        in_flight.set_function(lambda: len(self._running))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(scope, receive, send)
        try:
            await self._route(Request(scope, answer.receive), answer)
        except HTTPException as refused:
            await answer.refuse(refused.status_code, refused.detail)
        except Exception as error:
            answer.error = shortened(repr(error), SHOWN)
            await answer.refuse(500, "the server failed; its log has the reason")
        finally:
            if answer.path not in (HEALTH, READY, METRICS):
                self._log(answer)

    async def warm_up(self) -> None:
        """Generates two tokens; the server is ready then."""
        prompt = self._tokenizer("a", return_tensors="pt").to(self._model.device)
        await self._served.thread.async_submit(self._model.generate, **prompt, max_new_tokens=2)
        self.is_ready = True

    def drain(self) -> None:
        """Refuses new requests, and ends the running ones within `--grace_s` seconds."""
        self.is_ready = False
        last = asyncio.get_running_loop().time() + self.given.grace_s
        for timeout in self._running.values():
            timeout.reschedule(min(last, timeout.when() or last))

    async def _route(self, request: Request, answer: Answer) -> None:
        path, given = answer.path, self.given
        if request.method != METHODS.get(path):
            raise HTTPException(405 if path in METHODS else 404, f"there are only {METHODS}")
        if self._bearer and path.startswith("/v1/"):
            presented = request.headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(self._bearer, presented):
                raise HTTPException(401, "the API key is missing or wrong")
        if path == METRICS:
            metrics = generate_latest(self._registry)
            return await answer.give(Response(metrics, media_type="text/plain; version=0.0.4"))
        if path == MODELS:
            model = {"id": given.name, "object": "model", "created": 0, "owned_by": ""}
            return await answer.give(JSONResponse({"object": "list", "data": [model]}))
        if path != HEALTH and not self.is_ready:
            raise HTTPException(503, "the server is starting or shutting down")
        if path in (HEALTH, READY):
            return await answer.give(JSONResponse({"status": "ok"}))
        await self._generate(request, answer)

    async def _generate(self, request: Request, answer: Answer) -> None:
        given = self.given
        raw = await _body(request, given.max_body)
        if len(self._running) >= given.max_requests:
            raise HTTPException(429, f"{given.max_requests} requests are being answered")
        end = RequestEnd(self._tokenizer)
        try:
            async with asyncio.timeout(given.timeout_s) as self._running[answer.id]:
                read = asyncio.to_thread(checked, answer.path, raw, self._tokenizer, given)
                answer.body, answer.tokens["prompt"] = await read
                end.strings = answer.body.get("stop", [])
                made = self._served.respond(answer.body, answer.id, end)
                response = asyncio.ensure_future(made)
                leaving = asyncio.ensure_future(answer.receive())  # after the body: a disconnect
                try:
                    await asyncio.wait((response, leaving), return_when=asyncio.FIRST_COMPLETED)
                    if not response.done():
                        raise HTTPException(GONE, "the client closed the connection")
                finally:
                    response.cancel()
                    leaving.cancel()
                await answer.give(response.result())
        except TimeoutError as error:
            raise HTTPException(504, "the time for this request is over") from error
        finally:
            answer.tokens["completion"] = end.generated
            end.is_over.set()
            del self._running[answer.id]

    def _log(self, answer: Answer) -> None:
        seconds = time.perf_counter() - answer.start
        code = answer.code if answer.is_complete else GONE
        self._requests.labels(answer.path if answer.path in METHODS else "", code).inc()
        self._seconds.observe(seconds)
        for kind, number in answer.tokens.items():
            self._tokens.labels(kind).inc(number)
        line: dict[str, Any] = {"time": round(time.time(), 3), "id": answer.id}
        line |= {"path": shortened(answer.path, SHOWN), "code": code}
        line |= {"ms": round(seconds * 1000, 1), "tokens": answer.tokens}
        if answer.error:
            line["error"] = answer.error
        if self.given.log_prompts:
            line["request"] = shortened(json.dumps(answer.body, ensure_ascii=False), LOGGED)
        print(json.dumps(line), flush=True)


class Answer:
    """Sends the answer to one request, and has what the log says about it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.path, self.id, self.start = scope["path"], uuid.uuid4().hex, time.perf_counter()
        self.code, self.is_complete, self.error = 0, False, ""
        self.tokens, self.body = {"prompt": 0, "completion": 0}, dict[str, Any]()
        self._scope, self.receive, self._send = scope, receive, send

    async def send(self, event: Message) -> None:
        if event["type"] == "http.response.start":
            self.code = event["status"]
        else:
            self.is_complete = not event.get("more_body")
        await self._send(event)

    async def give(self, response: Response) -> None:
        await response(self._scope, self.receive, self.send)

    async def refuse(self, code: int, sentence: str) -> None:
        """Sends an error in OpenAI's form; in a stream that has started, as its last event."""
        kind = "invalid_request_error" if code < 500 else "server_error"
        sentence = shortened(sentence, SHOWN)
        error = {"error": {"message": sentence, "type": kind, "code": code}}
        if self.code:
            self.code = code
            last = f"data: {json.dumps(error)}\n\n".encode()
            await self.send({"type": "http.response.body", "body": last})
        else:
            await self.give(JSONResponse(error, code, HEADERS.get(code)))


class RequestEnd:
    """Stopping criterion of one request: a stop string, or a client that no longer waits.

    transformers' StopStringCriteria lists, for each request, how every token of the vocabulary may
    overlap a string: seconds and hundreds of megabytes for 150,000 tokens. Here the last tokens are
    decoded at each step; a string of n bytes is in n tokens or fewer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.is_over = threading.Event()  # set: the generation ends at its next token
        self.strings: list[str] = []
        self.generated = 0  # tokens
        self._tokenizer = tokenizer

    def __call__(self, tokens: Tensor, scores: object) -> Tensor:
        self.generated += 1  # transformers calls it after each token
        is_over = self.is_over.is_set()
        if self.strings:
            window = max(len(each.encode()) for each in self.strings) + BEFORE
            text = self._tokenizer.decode(tokens[0, -min(window, self.generated) :])
            is_over |= any(each in text for each in self.strings)
        return torch.full((1,), is_over, device=tokens.device)


async def _body(request: Request, most: int) -> bytes:
    """Returns a body; one that is too long is read to its end, so that its client reads a 413."""
    body, size = b"", 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size <= most:
                    body += part
    except TimeoutError as error:
        raise HTTPException(408, f"the body took over {BODY_S:g} s") from error
    except ClientDisconnect as error:
        raise HTTPException(GONE, "the client closed the connection") from error
    if size > most:
        raise HTTPException(413, f"the body has over {most} bytes")
    return body
