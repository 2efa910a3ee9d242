"""Gives the messages of a request the form that the model's chat template writes, as in training.

A published template drops what it does not know without an error. A request with a role, tools or a
call that the template does not write would be answered as if it had not been there."""

from __future__ import annotations

from typing import Any

from ....text.sources.chat_template import completeness_of
from ....text.sources.lossless import Lost, check_text
from ....text.sources.turns import REASONING, calls_of
from .fields import Refused


def fit_to_template(body: dict[str, Any], tokenizer: Any, *, asks: bool = True) -> None:
    """Replaces the messages and tools of a body, whose fields were checked, by the form that the
    chat template writes. `asks`: an answer is generated after them. Raises Refused if the template
    does not write one of them."""
    tools = body.get("tools")
    if not tools:  # an empty list is no tools
        tools = None
    options = {**body.get("chat_template_kwargs", {}), "add_generation_prompt": asks}
    template = tokenizer.get_chat_template(None, tools)
    completeness = completeness_of(tokenizer, template, **options)
    try:
        # a server's prompt may leave out the reasoning of earlier turns
        messages = [_message(turn) for turn in body["messages"]]
        fitted = completeness.fit(messages, tools, trained=())
        check_text(fitted.pieces, completeness.render(fitted.messages, fitted.tools), trained=())
    except Lost as lost:
        raise Refused(f"the model's chat template does not write {lost}; remove it") from lost
    body["messages"] = fitted.messages
    if fitted.tools is not None:
        body["tools"] = fitted.tools


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    """Returns a turn as chat templates read it: a text, and calls whose arguments are objects."""
    content = turn.get("content")
    if not content:  # a turn with calls may have none
        content = ""
    if isinstance(content, list):
        content = " ".join(part["text"] for part in content)
    message = {"role": turn["role"], "content": content}
    for key in ("tool_call_id", "name", *REASONING):
        if isinstance(turn.get(key), str):
            message[key] = turn[key]
    calls = turn.get("tool_calls")
    if calls:
        message["tool_calls"] = calls_of(lambda what: Refused(f"a message {what}"), calls)
    return message
