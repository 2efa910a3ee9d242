"""One model behind OpenAI's API, by transformers' own handlers, with a key and a limit of requests.
A reward model answers POST /pooling instead."""

from __future__ import annotations

import argparse
import asyncio
import hmac
import threading
import uuid
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from ....compat.transformers_serving import OneModel
from ....text.model.reward import is_reward_model
from .answers import CHAT, MODELS, SCORE, TEXT, error_response
from .pooling import scored

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MOST_BYTES = 1 << 20  # of a request: tokens of more take seconds, and delay other clients
# tokens that may hold a stop string; transformers' criterion makes tables of the vocabulary in
# seconds
WINDOW = 64
GREEDY = 0.01  # a lower temperature: logits divided by it overflow
# What transformers' handlers, pydantic and a chat template raise about a request's fields.
INVALID = (
    ArithmeticError,
    AttributeError,
    KeyError,
    RecursionError,
    TemplateError,
    TypeError,
    ValueError,
)


class App:
    """An ASGI application. Requests have to present `key`, if it is not ""; `given` are the verb's
    flags."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        key: str,
        given: argparse.Namespace,
    ) -> None:
        self._model, self._name = model, given.name
        self._tokenizer, self._served = (
            tokenizer,
            OneModel(model, tokenizer, given.name, given.max_tokens),
        )
        self._bearer = f"Bearer {key}".encode() if key else b""
        self._most, self._running = given.max_requests, 0
        self.stopping = threading.Event()  # set: every generation ends at its next token
        listed = {"id": given.name, "object": "model", "created": 0, "owned_by": ""}

        def refused(request: Request, refusal: Exception) -> Response:
            return error_response(
                getattr(refusal, "status_code", 500), getattr(refusal, "detail", "")
            )

        routes = [
            Route(CHAT, self._generate, methods=["POST"]),
            Route(TEXT, self._generate, methods=["POST"]),
            Route(SCORE, self._score, methods=["POST"]),
            Route(MODELS, JSONResponse({"object": "list", "data": [listed]})),
        ]
        self._routes = Starlette(routes=routes, exception_handlers={HTTPException: refused})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, presented = scope["path"], dict(scope["headers"]).get(b"authorization", b"")
        is_open = not path.startswith("/v1/") and path != SCORE
        if self._bearer and not is_open and not hmac.compare_digest(self._bearer, presented):
            return await error_response(401, "the API key is missing or wrong")(
                scope, receive, send
            )
        if path not in (CHAT, TEXT, SCORE):
            return await self._routes(scope, receive, send)
        if self._running >= self._most:
            why = f"{self._most} requests are being answered; try again later"
            return await error_response(429, why)(scope, receive, send)
        scope["is_over"] = is_over = threading.Event()
        self._running += 1
        try:
            await self._routes(scope, receive, send)
        finally:
            is_over.set()
            self._running -= 1

    async def _generate(self, request: Request) -> Response:
        is_over: threading.Event = request.scope["is_over"]
        stops, generated = list[str](), 0
        counted: dict[str, int] = request.scope.setdefault("tokens", {})

        def criterion(tokens: Tensor, scores: object) -> Tensor:  # called after each token
            nonlocal generated
            generated += 1
            counted.update(prompt=tokens.shape[1] - generated, completion=generated)
            is_last = is_over.is_set() or self.stopping.is_set()
            if stops:
                text = self._tokenizer.decode(tokens[0, -min(generated, WINDOW) :])
                is_last |= any(stop in text for stop in stops)
            return torch.full((len(tokens),), is_last, device=tokens.device)

        if is_reward_model(self._model):
            raise HTTPException(
                400, f"{self._name} scores answers and generates none: POST {SCORE}"
            )
        try:
            body = await _body(request)
            if body.get("temperature") is not None and body["temperature"] < GREEDY:
                body["temperature"] = 0.0
            given = body.pop("stop", None) or []
            stops += [given] if isinstance(given, str) else given
            answer = asyncio.ensure_future(self._served.respond(body, uuid.uuid4().hex, criterion))
            while not (await asyncio.wait([answer], timeout=0.1))[0]:
                if await request.is_disconnected():
                    is_over.set()
            return await answer
        except INVALID as error:
            raise HTTPException(400, f"the request cannot be answered: {error!r}") from error

    async def _score(self, request: Request) -> Response:
        if not is_reward_model(self._model):
            raise HTTPException(400, f"{self._name} generates answers and scores none: POST {CHAT}")
        try:
            given = self._model, self._tokenizer, self._name, await _body(request)
            answer = await asyncio.to_thread(scored, *given)
            request.scope.setdefault("tokens", {})["prompt"] = answer["usage"]["prompt_tokens"]
            return JSONResponse(answer)
        except INVALID as error:
            raise HTTPException(400, f"the request cannot be answered: {error!r}") from error


async def _body(request: Request) -> dict[str, Any]:
    if len(await request.body()) > MOST_BYTES:
        raise HTTPException(413, f"the body has over {MOST_BYTES} bytes")
    body = await request.json()
    if not isinstance(body, dict) or "generation_config" in body:
        raise ValueError("the body has to be an object, without generation_config")
    return body
