"""One model behind OpenAI's API, by transformers' own handlers, with a key and a limit of requests.
A reward model answers POST /pooling instead.

A request, in order (`App.__call__`):

1  Its headers are checked: key, host and origin, length (admission.py).
2  Its body is read, if a slot is free, and takes a slot.
3  Its fields, its length and its conversation are checked (fields.py, conversation.py).
4  transformers' handler generates; after each token, `criterion` counts it, looks for stop strings
   and ends where the client has left or the service stops.
5  The slot is free again."""

from __future__ import annotations

import argparse
import asyncio
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
from ....text.tokenizers import added_tokens
from .admission import Admission, body_of
from .answers import CHAT, MODELS, SCORE, TEXT, error_response
from .conversation import fit_to_template
from .fields import Refused, check_fields, check_length, parsed
from .pooling import scored

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Number of tokens that are searched for a stop string, or as many as it has bytes. transformers'
# own criterion first makes tables of the vocabulary, which takes seconds.
WINDOW = 64
GREEDY = 0.01  # a lower temperature: logits divided by it overflow
# What transformers' handlers, pydantic and a chat template raise about a request's fields.
INVALID = (
    ArithmeticError,
    AttributeError,
    LookupError,
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
        self._model, self._name, self._tokenizer = model, given.name, tokenizer
        fast: Any = tokenizer  # `export` writes no slow one
        num_appended = len(added_tokens(fast)[1])
        self._served = OneModel(model, tokenizer, given.name, given.max_tokens, num_appended)
        self._admission = Admission(key, given.allow_origin, given.allow_host)
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        self._most, self.running = given.max_requests, 0
        self.stopping = threading.Event()  # set: every generation ends at its next token
        listed = {"id": given.name, "object": "model", "created": 0, "owned_by": ""}

        def refused(request: Request, refusal: Exception) -> Response:
            code, why = getattr(refusal, "status_code", 500), getattr(refusal, "detail", "")
            return error_response(code, why)

        async def models(request: Request) -> Response:
            return JSONResponse({"object": "list", "data": [listed]})

        routes = [
            Route(CHAT, self._generate, methods=["POST"]),
            Route(TEXT, self._generate, methods=["POST"]),
            Route(SCORE, self._score, methods=["POST"]),
            Route(MODELS, models, methods=["GET"]),
        ]
        self._routes = Starlette(routes=routes, exception_handlers={HTTPException: refused})
        # /pooling/ would be redirected to the Host that the client names
        self._routes.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        try:
            if path.startswith("/v1/") or path == SCORE:
                self._admission.check(scope["headers"])
            if scope["method"] != "POST" or path not in (CHAT, TEXT, SCORE):
                return await self._routes(scope, receive, send)
            self._check_slots()  # without one, its body is not read
            # A request takes a slot when its body is there: slow clients delay themselves alone.
            scope["content"] = await body_of(receive)
            if scope["content"] is None:
                return None
            self._check_slots()
        except HTTPException as refusal:
            answer = error_response(refusal.status_code, refusal.detail)
            return await answer(scope, receive, send)
        scope["is_over"] = is_over = threading.Event()
        self.running += 1
        try:
            return await self._routes(scope, receive, send)
        finally:
            is_over.set()
            self.running -= 1

    def _check_slots(self) -> None:
        if self.running >= self._most:
            raise HTTPException(429, f"{self._most} requests are being answered; try again later")

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
                searched = max(WINDOW, *(len(stop.encode()) for stop in stops))
                text = self._tokenizer.decode(tokens[0, -min(generated, searched) :])
                is_last |= any(stop in text for stop in stops)
            return torch.full((len(tokens),), is_last, device=tokens.device)

        if is_reward_model(self._model):
            why = f"{self._name} scores answers and generates none: POST {SCORE}"
            raise HTTPException(400, why)
        try:
            body = await asyncio.to_thread(self._checked, request)
            if body.get("temperature") is not None and body["temperature"] < GREEDY:
                body["temperature"] = 0.0
            given = body.pop("stop", None)
            if isinstance(given, str):
                given = [given]
            if given:
                stops += filter(None, given)  # "" is in every text
            is_chat = request.url.path == CHAT
            responding = self._served.respond(is_chat, body, uuid.uuid4().hex, criterion)
            answer = asyncio.ensure_future(responding)
            while not answer.done():
                await asyncio.wait([answer], timeout=0.1)
                if not answer.done() and await request.is_disconnected():
                    is_over.set()
            return await answer
        except INVALID as error:
            raise _invalid(error) from error

    def _checked(self, request: Request) -> dict[str, Any]:
        body = parsed(request.scope["content"])
        needed = "messages" if request.url.path == CHAT else "prompt"
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        check_fields(body, needed, vocabulary, self._tokenizer)
        check_length(body, self._served.positions, self._longest_token)
        if needed == "messages":
            fit_to_template(body, self._tokenizer)
        return body

    async def _score(self, request: Request) -> Response:
        if not is_reward_model(self._model):
            raise HTTPException(400, f"{self._name} generates answers and scores none: POST {CHAT}")
        try:
            body = await asyncio.to_thread(parsed, request.scope["content"])
            given = self._model, self._tokenizer, self._name, body
            answer = await asyncio.to_thread(scored, *given)
            request.scope.setdefault("tokens", {})["prompt"] = answer["usage"]["prompt_tokens"]
            return JSONResponse(answer)
        except INVALID as error:
            raise _invalid(error) from error


def _invalid(error: Exception) -> HTTPException:
    why = str(error) if isinstance(error, Refused) else repr(error)
    return HTTPException(400, f"the request cannot be answered: {why}")
