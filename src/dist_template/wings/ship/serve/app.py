"""transformers' OpenAI-compatible handlers for one model, behind a key, limits and time-outs; with
health, metrics and a log. Its other routes load and unload any model, and are left out."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
import uuid
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import GenerateManager, GenerationState, Modality

from .ending import Ending
from .requests import CHAT, TEXT, Refused, checked, shortened

ENDING: ContextVar[Ending] = ContextVar("ending")  # of this request's generation
BODY_S = 10.0  # seconds for a client to send its request
GONE = 499  # nginx's code in the log: the client closed the connection before the answer's end
LOGGED = 4000  # most characters of a request in the log
COMPLETION = re.compile(rb'[^\\]"completion_tokens":(\d+)')  # of an answer's "usage"
FAILED = b'data: {"error"'  # of a handler's stream whose generation has raised
MODELS, HEALTH, READY, METRICS = "/v1/models", "/health", "/ready", "/metrics"
METHODS = {CHAT: "POST", TEXT: "POST"} | dict.fromkeys((MODELS, HEALTH, READY, METRICS), "GET")
CLOSE, RETRY = (b"connection", b"close"), (b"retry-after", b"2")
HEADERS = {401: (b"www-authenticate", b"Bearer"), 408: CLOSE, 413: CLOSE, 429: RETRY, 503: RETRY}


class App:
    """An ASGI application; `given` are the flags of the verb, and an empty `key` is none."""

    def __init__(self, model: Any, tokenizer: Any, key: str, given: Any) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

        one: Any = SimpleNamespace(  # of transformers' ModelManager, what the handlers use
            force_model=given.name,
            process_model_name=lambda name: name,
            load_model_and_processor=lambda *_, **__: (model, tokenizer),
            get_model_modality=lambda *_, **__: Modality.LLM,
        )
        self._model, self._tokenizer, self._thread = model, tokenizer, OneThread()
        chat, text = ChatCompletionHandler(one, self._thread), CompletionHandler(one, self._thread)
        self._handlers: dict[str, Any] = {CHAT: chat, TEXT: text}
        self.given, self.is_ready = given, False
        given.token_bytes = max(len(token.encode()) for token in tokenizer.get_vocab())
        self._bearer = f"Bearer {key}".encode() if key else b""
        self._running: dict[str, asyncio.Timeout] = {}
        of = CollectorRegistry()
        self._requests = Counter("serve_requests", "Requests", ["path", "code"], registry=of)
        self._seconds = Histogram("serve_seconds", "Seconds to an answer's end", registry=of)
        self._tokens = Counter("serve_tokens", "Tokens", ["kind"], registry=of)
        in_flight = Gauge("serve_in_flight", "Requests that are being answered", registry=of)
        in_flight.set_function(lambda: len(self._running))
        self._metrics = lambda: generate_latest(of)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = Answer(scope["path"], send)
        try:
            await self._route(scope, answer.watch(receive), answer)
        except Refused as refused:
            await answer.refuse(*refused.args)
        except Exception as error:
            answer.error = shortened(repr(error))
            await answer.refuse(500, "the server failed; its log has the reason")
        finally:
            if answer.path not in (HEALTH, READY, METRICS):
                self._log(answer)

    async def warm_up(self) -> None:
        """Generates two tokens; the server is ready then."""
        prompt = self._tokenizer("a", return_tensors="pt").to(self._model.device)
        await self._thread.async_submit(self._model.generate, **prompt, max_new_tokens=2)
        self.is_ready = True

    def drain(self) -> None:
        """Refuses new requests, and ends the running ones within `--grace_s` seconds."""
        self.is_ready = False
        last = asyncio.get_running_loop().time() + self.given.grace_s
        for timeout in self._running.values():
            timeout.reschedule(min(last, timeout.when() or last))

    async def _route(self, scope: Any, receive: Any, answer: Answer) -> None:
        path, given, sent = answer.path, self.given, dict(scope["headers"]).get(b"authorization")
        if scope["method"] != METHODS.get(path):
            raise Refused(405 if path in METHODS else 404, f"there are only {METHODS}")
        if self._bearer and path.startswith("/v1/"):
            if not hmac.compare_digest(self._bearer, sent or b""):
                raise Refused(401, "the API key is missing or wrong")
        if path == METRICS:
            return await answer.whole(200, self._metrics(), b"text/plain; version=0.0.4")
        if path == MODELS:
            model = {"id": given.name, "object": "model", "created": 0, "owned_by": ""}
            return await answer.whole(200, {"object": "list", "data": [model]})
        if path != HEALTH and not self.is_ready:
            raise Refused(503, "the server is starting or shutting down")
        if path in (HEALTH, READY):
            return await answer.whole(200, {"status": "ok"})
        raw = await _read(receive, given.max_body)
        if len(self._running) >= given.max_requests:
            raise Refused(429, f"{given.max_requests} requests are being answered")
        ENDING.set(ending := Ending(self._tokenizer))
        try:
            async with asyncio.timeout(given.timeout_s) as self._running[answer.id]:
                body, length = await asyncio.to_thread(checked, path, raw, self._tokenizer, given)
                answer.body, answer.tokens["prompt"] = body, length
                ending.strings = body.get("stop", [])
                rest = {name: body[name] for name in body if name != "stop"}
                made = self._handlers[path].handle_request(rest, answer.id)
                if response := await _unless_gone(made, receive):
                    await response(scope, receive, answer.send)
        except TimeoutError as error:
            raise Refused(504, "the time for this request is over") from error
        finally:
            ending.is_over.set()
            del self._running[answer.id]

    def _log(self, answer: Answer) -> None:
        seconds, code = time.perf_counter() - answer.start, answer.code or 500
        self._requests.labels(answer.path if answer.path in METHODS else "", code).inc()
        self._seconds.observe(seconds)
        for kind, number in answer.tokens.items():
            self._tokens.labels(kind).inc(number)
        line: dict[str, Any] = {"time": round(time.time(), 3), "id": answer.id}
        line |= {"path": shortened(answer.path), "code": code, "ms": round(seconds * 1000, 1)}
        line |= {"tokens": answer.tokens} | ({"error": answer.error} if answer.error else {})
        if self.given.log_prompts:
            line["request"] = shortened(json.dumps(answer.body, ensure_ascii=False), LOGGED)
        print(json.dumps(line), flush=True)


class Answer:
    """Sends the answer to one request, and remembers what the log says about it."""

    def __init__(self, path: str, send: Any) -> None:
        self.path, self.id, self._send = path, uuid.uuid4().hex, send
        self.code, self.tokens = 0, {"prompt": 0, "completion": 0}
        self.is_stream, self.is_complete, self.error = False, False, ""
        self.start, self.body = time.perf_counter(), dict[str, Any]()

    def watch(self, receive: Any) -> Any:
        """Returns `receive`, after which the log says whether the client has gone."""

        async def watched() -> Any:
            event = await receive()
            if event["type"] == "http.disconnect" and not self.is_complete:
                self.code = GONE
            return event

        return watched

    async def send(self, event: dict[str, Any]) -> None:
        """Sends an event of a handler; a stream gets the mark at which OpenAI's end."""
        if event["type"] == "http.response.start":
            self.code = event["status"]
            self.is_stream = b"event-stream" in dict(event["headers"]).get(b"content-type", b"")
        else:
            body = event.get("body", b"")
            if self.is_stream and FAILED in body:
                raise RuntimeError(body.decode())  # its quotes are not JSON's
            for tokens in COMPLETION.findall(body):
                self.tokens["completion"] = int(tokens)
            self.is_complete = not event.get("more_body")
            if self.is_stream and not event.get("more_body"):
                event = event | {"body": body + b"data: [DONE]\n\n"}
        await self._send(event)

    async def refuse(self, code: int, sentence: str) -> None:
        """Sends an error in OpenAI's form; in a stream that has started, as its last event."""
        kind = "invalid_request_error" if code < 500 else "server_error"
        error = {"error": {"message": shortened(sentence), "type": kind, "code": code}}
        if not self.code:
            return await self.whole(code, error)
        self.code, last = code, f"data: {json.dumps(error)}\n\n".encode()
        await self._send({"type": "http.response.body", "body": last})

    async def whole(self, code: int, content: Any, kind: bytes = b"application/json") -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        headers += [HEADERS[code]] if code in HEADERS else []
        self.code = code
        await self._send({"type": "http.response.start", "status": code, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


class OneThread(GenerationState, GenerateManager):
    """Generates for one request after another, and stops when a request's time is over."""

    def __init__(self) -> None:
        GenerationState.__init__(self)
        GenerateManager.__init__(self)

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        return self

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, *given: Any, **named: Any
    ) -> Any:
        inputs = {**inputs, "stopping_criteria": [ENDING.get()]}
        return super().generate_streaming(model, processor, inputs, *given, **named)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, *given: Any, **named: Any
    ) -> Any:
        inputs = {**inputs, "stopping_criteria": [ENDING.get()]}
        return await super().generate_non_streaming(model, processor, inputs, *given, **named)

    def async_submit(self, fn: Any, *args: Any, **kwargs: Any) -> asyncio.Future:
        ending = ENDING.get(None)

        def generate(*args: Any, **kwargs: Any) -> Any:
            if ending and ending.is_over.is_set():
                raise TimeoutError("the request was given up before its turn")
            return fn(*args, **kwargs)

        # Shielded: the thread could not set a cancelled one's result.
        return asyncio.shield(super().async_submit(generate, *args, **kwargs))


async def _unless_gone(handled: Any, receive: Any) -> Any:
    """Returns what a handler returns; None if the client closes the connection before it."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(handled), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()


async def _read(receive: Any, most: int) -> bytes:
    """Returns a body; one that is too long is read to its end, so that its client reads a 413."""
    body, size, event = b"", 0, {"more_body": True}
    try:
        async with asyncio.timeout(BODY_S):
            while event.get("more_body"):
                event = await receive()
                if event["type"] == "http.disconnect":
                    raise Refused(GONE, "the client closed the connection")
                size += len(event.get("body", b""))
                body = body + event.get("body", b"") if size <= most else b""
    except TimeoutError as error:
        raise Refused(408, f"the body took over {BODY_S:g} s") from error
    if size > most:
        raise Refused(413, f"the body has over {most} bytes")
    return body
