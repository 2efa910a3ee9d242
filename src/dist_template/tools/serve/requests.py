"""What a request may contain: its fields, and how many tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.utils import Modality

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Refused(Exception):
    """Refuses a request. Its arguments are an HTTP status and a sentence."""


@cache
def fields(path: str) -> Any:
    """Returns pydantic's model of a body. It lacks the fields that transformers' handlers ignore,
    and those that would replace the server's settings: a request with one of them is refused."""
    from pydantic import ConfigDict, Field, create_model

    chat = {"messages": (list[dict], Field(min_length=1)), "tools": (list[dict] | None, None)}
    own: Any = chat if path == CHAT else {"prompt": (str, Field(min_length=1))}
    kinds: Any = {"model": str, "stream": bool, "stream_options": dict, "user": str}
    kinds["stop"] = str | list[str]
    ranges: Any = {"n": (1, 1), "max_tokens": (1, 2**31), "max_completion_tokens": (1, 2**31)}
    ranges |= {"temperature": (0.0, 2.0), "top_p": (1e-6, 1.0), "frequency_penalty": (0.0, 2.0)}
    ranges["seed"] = (0, 2**63 - 1)
    own |= {name: (kind | None, None) for name, kind in kinds.items()}
    for name, (least, most) in ranges.items():
        own[name] = (type(least) | None, Field(None, ge=least, le=most))
    return create_model(path, __config__=ConfigDict(extra="forbid", strict=True), **own)


def checked(path: str, raw: bytes, tokenizer: Any, given: Any) -> tuple[dict[str, Any], int]:
    """Returns a body whose `max_tokens` is allowed, and the number of its prompt's tokens.

    Raises:
        Refused: it is not JSON, a field or the model is unknown, or it has too many tokens.
    """
    if path == CHAT and not tokenizer.chat_template:
        raise Refused(400, f"the model has no chat template; use {TEXT}")
    try:
        body = fields(path).model_validate_json(raw).model_dump(exclude_none=True)
        prompt = body.get("prompt")
        if path == CHAT:
            read = ChatCompletionHandler.get_processor_inputs_from_messages
            turns, tools = read(body["messages"], Modality.LLM), body.get("tools")
            options: Any = {"add_generation_prompt": True, "tokenize": False, "tools": tools}
            prompt = tokenizer.apply_chat_template(turns, **options)
        length = len(tokenizer(prompt, add_special_tokens=path == TEXT)["input_ids"])
    except Exception as error:  # pydantic's, or what a template raises about a client's messages
        found = getattr(error, "errors", lambda: [{}])()[0]
        where = ".".join(map(str, found.get("loc", ()))) or "the request"
        raise Refused(400, f"{where}: {found.get('msg', repr(error))}") from error
    if body.setdefault("model", given.name) != given.name:
        raise Refused(404, f"the model is {given.name!r}, and {body['model']!r} is not served")
    most = given.max_tokens
    asked = body.pop("max_completion_tokens", None) or body.get("max_tokens")
    if (asked or 1) > most or length + (asked or 1) > given.context:
        limits = f"an answer has at most {most} tokens, and at most {given.context} with its prompt"
        raise Refused(400, f"{limits}; this prompt has {length}, and {asked or 1} are asked for")
    return body | {"max_tokens": asked or min(most, given.context - length)}, length
