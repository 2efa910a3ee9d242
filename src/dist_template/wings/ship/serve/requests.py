"""What a request may contain: its fields, their sizes, and how many tokens."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.exceptions import HTTPException

from ....compat.transformers_serving import OneModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GREEDY = 0.01  # a lower temperature: logits divided by it overflow
SHOWN = 300  # most characters of an error, and of a path in the log


def _strings(given: object) -> object:
    return [given] if isinstance(given, str) else given


def _parts(given: object) -> object:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


Name = Annotated[str, Field(max_length=256)]
Tokens = Annotated[int, Field(ge=1, le=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=64)]


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Part(Fields):
    type: Literal["text"]
    text: str


class Message(Fields):
    """Its further fields, as an earlier answer has them, are not read by the handlers."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[Part] | None, Field(max_length=1000), BeforeValidator(_parts)] = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_call_id: Name | None = None


class Request(Fields):
    """A body without the fields that transformers' handlers ignore, and without those that would
    replace the server's settings: a request with one of them is refused."""

    model: Name | None = None
    user: Name | None = None
    stream: bool | None = None
    stream_options: dict[Literal["include_usage"], bool] | None = None  # usage is always sent
    stop: Annotated[list[Stop] | None, Field(max_length=4), BeforeValidator(_strings)] = None
    n: Literal[1] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=1e-6, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=2)] | None = None


class Chat(Request):
    messages: Annotated[list[Message], Field(min_length=1, max_length=1000)]
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None


class Completion(Request):
    prompt: Annotated[str, Field(min_length=1)]


def checked(
    path: str, raw: bytes, tokenizer: PreTrainedTokenizerBase, given: argparse.Namespace
) -> tuple[dict[str, Any], int]:
    """Returns a body whose `max_tokens` is allowed, and the number of its prompt's tokens.

    Raises:
        HTTPException: it is not JSON, a field or the model is unknown, or it has too many tokens.
    """
    if path == CHAT and not tokenizer.chat_template:
        raise HTTPException(400, f"the model has no chat template; use {TEXT}")
    kind = Chat if path == CHAT else Completion
    try:
        body = kind.model_validate_json(raw).model_dump(exclude_none=True)
        prompt: str = body.get("prompt", "")
        if path == CHAT:
            turns, tools = OneModel.plain_messages(body["messages"]), body.get("tools")
            prompt = str(tokenizer.apply_chat_template(turns, tools=tools, add_generation_prompt=True, tokenize=False))
        # Tokens of a megabyte take seconds and a gigabyte, and delay other clients.
        size, length = len(prompt.encode(errors="replace")), given.context + 1
        has = f"more than {given.context} in its {size} bytes"
        if size <= given.context * given.token_bytes:
            length = len(tokenizer(prompt, add_special_tokens=path == TEXT)["input_ids"])
            has = f"{length}"
    except Exception as error:  # pydantic's, or what a template raises about a client's messages
        found = getattr(error, "errors", lambda: [{}])()[0]
        where = ".".join(map(str, found.get("loc", ()))) or "the request"
        raise HTTPException(400, f"{where}: {found.get('msg', repr(error))}") from error
    if body.setdefault("model", given.name) != given.name:
        why = f"the model is {given.name!r}, and {body['model']!r} is not served"
        raise HTTPException(404, why)
    if body.get("temperature", 1) < GREEDY:
        body["temperature"] = 0.0
    most = given.max_tokens
    asked = body.pop("max_completion_tokens", None) or body.get("max_tokens")
    if (asked or 1) > most or length + (asked or 1) > given.context:
        limits = f"an answer has at most {most} tokens, and at most {given.context} with its prompt"
        why = f"{limits}; this prompt has {has}, and {asked or 1} are asked for"
        raise HTTPException(400, why)
    body["max_tokens"] = asked or min(most, given.context - length)
    return body, length
