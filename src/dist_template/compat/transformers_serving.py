"""transformers' handlers of OpenAI's API, for one model that is loaded. Verified on transformers
5.23.

`transformers.cli.serving` has no underscore, and no documentation promises its classes. The public
command `transformers serve` loads the model by itself, so it would not be the one that was compared
with the trained one, and has routes that load any model of the hub. Where a name is gone, the
import of this file raises ImportError and `serve` does not start; `export` does not need it.
tests/wings/test_serve.py uses them all."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from torch import Tensor
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import (
    GenerateManager,
    GenerationState,
    InferenceThread,
    Modality,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

FAILED = 'data: {"error"'  # in a handler's stream, if its generation has raised


class OneModel:
    """Replaces the handlers' ModelManager; it has one model and never loads another. An answer has
    at most `max_tokens` tokens, and with its prompt at most as many as the model has positions.
    `num_appended` tokens, which the tokenizer puts after a text (EOS), are no part of a prompt."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        max_tokens: int,
        num_appended: int = 0,
    ) -> None:
        self.force_model, self._loaded = name, (model, tokenizer)
        self.num_appended = num_appended
        self.thread, self.max_tokens = InferenceThread(), max_tokens
        self.positions: int = getattr(model.config, "max_position_embeddings", sys.maxsize)

    def process_model_name(self, name: str) -> str:
        return name

    def load_model_and_processor(
        self, *_: object, **__: object
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        return self._loaded

    def get_model_modality(self, *_: object, **__: object) -> Modality:
        return Modality.LLM

    async def respond(
        self, is_chat: bool, body: dict[str, Any], request_id: str, criterion: Callable[..., Tensor]
    ) -> Response:
        """Answers a request; `criterion` ends its generation. A stream ends with OpenAI's
        `[DONE]`."""
        kind: Any = _Chat if is_chat else _Completion
        handler = kind(self, _Generation(self, criterion))

        def prepare() -> Callable[[], Any]:
            # Nothing in it waits: a loop of its own runs it at once.
            return asyncio.run(handler.handle_request(body, request_id))

        # Other requests are answered while this one's text is tokenized.
        answer = await asyncio.to_thread(prepare)
        response = answer()
        if inspect.isawaitable(response):
            response = await response
        if isinstance(response, StreamingResponse):
            response.body_iterator = _finished(response.body_iterator)
        return response


async def _finished(events: AsyncIterable[str | bytes | memoryview]) -> AsyncGenerator[str]:
    async for event in events:
        text = str(event)
        if FAILED in text:  # its message's quotes are not escaped
            why = text.strip().removeprefix(FAILED).strip(': "}')
            error = {"message": why, "type": "server_error", "code": 500}
            yield f"data: {json.dumps({'error': error})}\n\n"
            return
        yield text
    yield "data: [DONE]\n\n"


class _Prepared:
    """Ends a handler's `handle_request` before it generates: it validates, tokenizes, and returns
    the call that answers. Both handlers end in one of these two methods."""

    generation_state: _Generation

    def _streaming(self, *given: Any, **named: Any) -> Any:
        method: Any = super()
        return partial(method._streaming, *self._limited(*given), **named)

    async def _non_streaming(self, *given: Any, **named: Any) -> Any:
        method: Any = super()
        return partial(method._non_streaming, *self._limited(*given), **named)

    def _limited(
        self, request_id: str, model: Any, processor: Any, name: str, inputs: Any, *rest: Any
    ) -> tuple:
        inputs = self.generation_state.limited(inputs, rest[0])
        return request_id, model, processor, name, inputs, *rest


class _Chat(_Prepared, ChatCompletionHandler):
    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict], modality: Modality) -> list[dict]:
        """Returns the messages as they are: `serve` has made texts of them. The handler's own
        method would drop the text beside a tool call, names and reasoning."""
        return messages


class _Completion(_Prepared, CompletionHandler):
    def _limited(
        self, request_id: str, model: Any, processor: Any, name: str, inputs: Any, *rest: Any
    ) -> tuple:
        num = self.generation_state.num_appended
        if num:
            inputs = {key: value[..., :-num] for key, value in inputs.items()}
        return super()._limited(request_id, model, processor, name, inputs, *rest)

    def _build_generation_config(self, body: dict, *given: Any, **named: Any) -> Any:
        """Adds `logit_bias`, which transformers' handler reads of conversations alone."""
        config = super()._build_generation_config(body, *given, **named)
        bias = body.get("logit_bias")
        if bias:
            config.sequence_bias = {(int(token),): value for token, value in bias.items()}
        return config


class _Generation(GenerationState, GenerateManager):
    """Generates for one request, on the thread of all of them, with a stopping criterion and
    limits."""

    def __init__(self, served: OneModel, criterion: Callable[..., Tensor]) -> None:
        GenerationState.__init__(self)
        self._served, self._thread = served, served.thread
        self._criteria = {"stopping_criteria": [criterion]}
        self.num_appended = served.num_appended

    def get_manager(self, model_id: str, use_cb: bool = False) -> _Generation:
        return self

    def limited(self, inputs: Any, config: GenerationConfig) -> dict[str, Any]:
        """Limits the answer, and returns the inputs of `generate` with the criterion."""
        length, positions = inputs["input_ids"].shape[-1], self._served.positions
        if not length:
            raise HTTPException(400, "the prompt has no tokens")
        if length >= positions:
            raise HTTPException(
                400, f"the prompt has {length} tokens, and the model has {positions} positions"
            )
        config.max_new_tokens = min(
            config.max_new_tokens, self._served.max_tokens, positions - length
        )
        return {**inputs, **self._criteria}
