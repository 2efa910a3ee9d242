"""transformers' handlers of OpenAI's API, for one model that is loaded. Verified on transformers 5.23.

`transformers.cli.serving` has no underscore, and no documentation promises its classes. The public command
`transformers serve` loads the model by itself, so it would not be the one that was compared with the trained one, and
has routes that load any model of the hub. Where a name is gone, the import of this file raises ImportError and `serve`
does not start; `export` does not need it. tests/compat/test_transformers_serving.py checks names and signatures.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from typing import TYPE_CHECKING, Any

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
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FAILED = 'data: {"error"'  # in a handler's stream, if its generation has raised


class OneModel:
    """Replaces the handlers' ModelManager; it has one model and never loads another."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self.force_model, self._loaded = name, (model, tokenizer)
        self.thread = InferenceThread()

    def process_model_name(self, name: str) -> str:
        return name

    def load_model_and_processor(self, *_: object, **__: object) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        return self._loaded

    def get_model_modality(self, *_: object, **__: object) -> Modality:
        return Modality.LLM

    @staticmethod
    def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Converts OpenAI's messages to those that a chat template reads, as the handler does."""
        return ChatCompletionHandler.get_processor_inputs_from_messages(messages, Modality.LLM)

    async def respond(self, body: dict[str, Any], request_id: str, criterion: Callable[..., Tensor]) -> Response:
        """Answers a request whose fields were checked.

        `criterion` ends its generation, and has to find the strings of `stop` too. A stream ends
        with OpenAI's `[DONE]`. It raises RuntimeError where its generation has raised: in the event
        that transformers sends then, the message's quotes are not escaped.
        """
        manager: Any = self
        kind = ChatCompletionHandler if "messages" in body else CompletionHandler
        handler = kind(manager, _Generation(self.thread, criterion))
        fields = {name: body[name] for name in body if name != "stop"}
        response = await handler.handle_request(fields, request_id)
        if isinstance(response, StreamingResponse):
            response.body_iterator = _finished(response.body_iterator)
        return response


async def _finished(events: AsyncIterable[str | bytes | memoryview]) -> AsyncGenerator[str]:
    async for event in events:
        text = str(event)
        if FAILED in text:
            raise RuntimeError(text)
        yield text
    yield "data: [DONE]\n\n"


class _Generation(GenerationState, GenerateManager):
    """Generates for one request, on the thread of all of them, with a stopping criterion."""

    def __init__(self, thread: InferenceThread, criterion: Callable[..., Tensor]) -> None:
        GenerationState.__init__(self)
        self._thread, self._criteria = thread, {"stopping_criteria": [criterion]}

    def get_manager(self, model_id: str, use_cb: bool = False) -> _Generation:
        return self

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        inputs = {**inputs, **self._criteria}
        return super().generate_streaming(model, processor, inputs, *given, **named)

    async def generate_non_streaming(self, model: Any, processor: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        inputs = {**inputs, **self._criteria}
        return await super().generate_non_streaming(model, processor, inputs, *given, **named)

    def async_submit(self, fn: Callable, *args: object, **kwargs: object) -> asyncio.Future:
        # Shielded: the thread sets a result, which a cancelled future refuses with a traceback.
        return asyncio.shield(super().async_submit(fn, *args, **kwargs))
