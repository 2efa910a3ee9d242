"""The fields of a request: their types and ranges, checked before transformers reads them.

transformers' handlers convert what they get: `max_tokens: true` is 1, a huge seed or a penalty of
1e308 fails in a kernel, and `chat_template_kwargs` replaces the template by one of the client's.
Of OpenAI's fields they ignore those that they do not implement: a client that asks for three
answers, or sends an image, would get one answer to the text alone.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from typing import Any

LARGEST = 2**31 - 1
MOST_STOPS = 16
LONGEST_STOP = 256  # characters
TEXTS = ("text", "input_text", "output_text")  # types of a message's parts that are read


class Refused(ValueError):
    """A request's fault, in a sentence."""


# ---- types of fields -----------------------------------------------------------------------------


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_objects(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_object, value))


def _is_conversation(value: Any) -> bool:
    if not value or not _is_objects(value):
        return False
    return all(isinstance(turn.get("role"), str) for turn in value)


def _is_stop(value: Any) -> bool:
    if isinstance(value, str):  # "" stops nothing, and some clients send it
        return len(value) <= LONGEST_STOP
    if not isinstance(value, list) or len(value) > MOST_STOPS:
        return False
    return all(isinstance(each, str) and 0 < len(each) <= LONGEST_STOP for each in value)


def _is_bias(value: Any) -> bool:
    if not _is_object(value):
        return False
    is_allowed = _number(-100, 100)
    for key, bias in value.items():
        is_token_id = key.isascii() and key.isdigit() and len(key) < 10
        if not is_token_id or not is_allowed(bias):
            return False
    return True


def _number(least: float, most: float, is_whole: bool = False) -> Callable[[Any], bool]:
    kinds = int if is_whole else (int, float)

    def is_allowed(value: Any) -> bool:
        if not isinstance(value, kinds) or isinstance(value, bool):
            return False
        return least <= value <= most

    return is_allowed


def _is_tools(value: Any) -> bool:
    if not _is_objects(value):
        return False
    for tool in value:
        function = tool.get("function")
        if tool.get("type") != "function" or not _is_object(function):
            return False
        name = function.get("name")
        if not isinstance(name, str) or not name:
            return False
    return True


def _is_stream_options(value: Any) -> bool:
    if not _is_object(value) or not value.keys() <= {"include_usage", "include_obfuscation"}:
        return False
    return all(map(_is_bool, value.values()))


# Name: (whether a value is allowed, what is allowed). Other fields are unknown: 422.
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (_is_text, "a text"),
    "messages": (_is_conversation, "a list of messages, each with a role"),
    "model": (_is_text, "the model's name"),
    "max_tokens": (_number(1, LARGEST, is_whole=True), f"a whole number from 1 to {LARGEST}"),
    "max_completion_tokens": (
        _number(1, LARGEST, is_whole=True),
        f"a whole number from 1 to {LARGEST}",
    ),
    "temperature": (_number(0, 100), "a number from 0 to 100"),
    "top_p": (_number(1e-6, 1), "a number above 0, at most 1"),
    "frequency_penalty": (_number(-0.99, 2), "a number above -1, at most 2"),
    "seed": (_number(0, 2**63 - 1, is_whole=True), "a whole number from 0 to 2**63 - 1"),
    "stream": (_is_bool, "true or false"),
    "stream_options": (_is_stream_options, "an object with include_usage, true or false"),
    "stop": (
        _is_stop,
        f"a text, or at most {MOST_STOPS} texts that are not empty, of {LONGEST_STOP} characters",
    ),
    "logit_bias": (_is_bias, "an object of token ids and numbers from -100 to 100"),
    "tools": (_is_tools, "a list of tools of the type function, each with a function's name"),
    "chat_template_kwargs": (_is_object, "an object"),
    # What OpenAI's service records or charges by; no answer depends on it.
    "user": (_is_text, "a text"),
    "safety_identifier": (_is_text, "a text"),
    "prompt_cache_key": (_is_text, "a text"),
    "prompt_cache_options": (_is_object, "an object"),
    "prompt_cache_retention": (_is_text, "a text"),
    "metadata": (_is_object, "an object"),
}

# OpenAI's fields that would change the answer and are not implemented: the values without effect,
# which clients send by default.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("auto",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "moderation": (),
    "web_search_options": (),
}


# Without tools, these have no effect either.
WITHOUT_TOOLS: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
    "parallel_tool_calls": (True, False),
}


# ---- the checks ----------------------------------------------------------------------------------


def parsed(content: bytes) -> dict[str, Any]:
    """Returns a body's object, without fields that are null. Raises ValueError or RecursionError
    if it is not JSON: Python's parser accepts NaN, infinities and halves of surrogate pairs."""
    body = json.loads(content, parse_constant=_constant, parse_float=_finite)
    if not isinstance(body, dict) or "generation_config" in body:
        raise Refused("the body has to be an object, without generation_config")
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refused("the body has half of a surrogate pair, which is no character") from None
    return {name: value for name, value in body.items() if value is not None}


def check_fields(body: dict[str, Any], needed: str, vocabulary: int, tokenizer: Any) -> None:
    """Raises Refused if `needed` is missing or a field is of another type or range; converts
    `logit_bias` to the floats that transformers needs."""
    if needed not in body:
        raise Refused(f"{needed} is missing; give {FIELDS[needed][1]}")
    for name, (is_allowed, allowed) in FIELDS.items():
        if name in body and not is_allowed(body[name]):
            raise Refused(f"{name} is {_short(body[name])}; give {allowed}")
    neutral = NEUTRAL if body.get("tools") else NEUTRAL | WITHOUT_TOOLS
    for name, values in neutral.items():
        if name in body and not _is_one_of(body[name], values):
            raise Refused(f"{name} {_short(body[name])} is not supported; remove it")
    if "stream_options" in body and not body.get("stream"):
        raise Refused("stream_options has no effect without stream true; remove it")
    both = {body[name] for name in ("max_tokens", "max_completion_tokens") if name in body}
    if len(both) > 1:
        raise Refused("max_tokens and max_completion_tokens differ; give one of them")
    _check_parts(body.get("messages", ()))
    bias = body.get("logit_bias", {})
    if any(int(token) >= vocabulary for token in bias):
        raise Refused(f"logit_bias has a token id of {vocabulary} or more, the vocabulary's size")
    if bias:
        body["logit_bias"] = {token: float(value) for token, value in bias.items()}
    else:
        body.pop("logit_bias", None)  # transformers refuses an empty one
    own = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    taken = sorted(own & set(body.get("chat_template_kwargs", {})))
    if taken:
        raise Refused(f"chat_template_kwargs.{taken[0]} is the service's; remove it")


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether `value` is one of `values`, where true is not 1."""
    return any(value == each and _is_bool(value) == _is_bool(each) for each in values)


def _check_parts(turns: Any) -> None:
    """Raises Refused for a part of a message that is no text, which would not be read."""
    for turn in turns:
        content = turn.get("content")
        has_call = turn.get("tool_calls") or turn.get("function_call")
        if content is None and not has_call:
            raise Refused(f"a message of {_short(turn['role'])} has no content; give a text")
        if not isinstance(content, list | str | None):
            raise Refused(f"content is {_short(content)}; give a text, or a list of parts")
        if not isinstance(content, list):
            continue
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else part
            if kind not in TEXTS or not isinstance(part.get("text"), str):
                raise Refused(
                    f"a part of a message is {_short(kind)}; give parts of the type text, with a"
                    " text: this model reads nothing else"
                )


def check_length(body: dict[str, Any], positions: int, longest_token: int) -> None:
    """Raises Refused if the texts have more characters than the model has positions, each with the
    longest token of the vocabulary, or a conversation more messages: it is not tokenized then. Any
    text of messages, tools and chat_template_kwargs may be in the prompt: the template decides."""
    turns = body.get("messages", ())
    if len(turns) > positions:
        raise Refused(f"messages has {len(turns)} entries, and the model has {positions} positions")
    names = ("prompt", "messages", "tools", "chat_template_kwargs")
    length = sum(_characters(body[name]) for name in names if name in body)
    if length > positions * longest_token:
        raise Refused(
            f"the text has {length} characters; {positions} positions of at most {longest_token}"
            f" characters hold {positions * longest_token}"
        )


def _characters(tree: Any) -> int:
    """Returns the characters of the texts of a JSON value, without the names of fields."""
    if isinstance(tree, str):
        return len(tree)
    if isinstance(tree, dict):
        return sum(map(_characters, tree.values()))
    if isinstance(tree, list):
        return sum(map(_characters, tree))
    return 0


def _constant(text: str) -> float:
    raise Refused(f"{text} is not JSON; give a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Refused(f"{text[:50]} is too large a number")
    return value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 50 else f"{text[:50]} …"
