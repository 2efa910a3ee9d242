"""Reads the turns of published conversations as messages: role, content, and what else they say.

    OpenAI      {"role": "assistant", "content": null, "tool_calls": [{"function": {…}}]}, `weight`
    ShareGPT    {"from": "gpt", "value": …}, with function_call and observation (LLaMA-Factory)
    axolotl     `train` or `training`            ms-swift    `loss`

A key that means something in another tool and is not read here is refused: see `REFUSED`. Keys of a
record that mean nothing to training, such as `id` and `source`, are counted for `prepare`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .records import Record, wrong

Message = dict[str, Any]  # role and content, and what else a turn has, such as tool_calls
Fail = Callable[[str], Exception]  # makes an error of what is wrong, such as "has a turn …"

COUNTS = "train"  # key of a message in a document: whether it counts, whatever its role
SHAPES = (
    "messages: [{role, content}, …]; conversations: [{from, value}, …]; prompt and completion; or "
    "instruction, input"
    " and output (other names: data.source.columns)"
)
CALL = "function_call"  # role of a turn whose text is the JSON of calls
# Roles of published data, in lower case, and their names in chat templates.
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys("assistant gpt chatgpt bing bard bot ai model chatbot".split(), "assistant"),
    **dict.fromkeys(("tool", "tool_response", "observation"), "tool"),
    **dict.fromkeys(("function", "function_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), CALL),
    "system": "system",
    "developer": "developer",
}
TEXTS = ("text", "input_text", "output_text")  # types of a content's parts
REASONING = ("reasoning_content", "reasoning", "thinking")  # keys, as in transformers

# Keys of a message that say whether it counts: true or false, 1 or 0.
WEIGHTS = (COUNTS, "training", "trainable", "weight", "loss")
MEDIA = ("images", "image", "audios", "audio", "videos", "video", "documents", "objects")
# Masks and weights of a form that is not read; and contents that are no text.
REFUSED_IN_TURNS = frozenset(
    (*MEDIA, "mask", "masked", "loss_mask", "loss_weight", "loss_scale", "chat_template_kwargs")
) | {"train_detail", "training_detail"}
# The same of a record, and keys that mean training in another shape or tool.
REFUSED = (REFUSED_IN_TURNS | {*WEIGHTS}) | {
    *("system", "system_prompt", "system_message", "tools", "functions", "history"),
    *("chosen", "rejected", "rejected_response", "kto_tag", "enable_thinking", *REASONING),
}
# What a message may have; everything else is passed on to the template too, which may read it.
KNOWN = {"role", "content", "tool_calls", "tool_call_id", *REASONING, *WEIGHTS}


@dataclass(frozen=True)
class Reader:
    """Reads turns as messages, and checks that no key is lost.

    `columns`, `role_names` and `ignored` are the arguments of Chat. `fills`: the records' format
    fills missing keys with null, as Arrow does, so that null is no value."""

    columns: dict[str, str] = field(default_factory=dict)
    role_names: dict[str, str] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    fills: bool = False

    def messages(self, name: str, turns: object, role: str) -> list[Message]:
        """Returns the messages of turns; a text is one of `role`."""
        if isinstance(turns, dict):
            turns = [turns]
        if not isinstance(turns, list):
            turns = [{"role": role, "content": turns}]
        return [self._message(name, turn) for turn in turns]

    def _message(self, name: str, turn: object) -> Message:
        if not isinstance(turn, dict):
            raise wrong(name, f"has a turn without a role: give {SHAPES}")
        others = {
            key: value
            for key, value in renamed(turn, self.columns).items()
            if key not in self.ignored and key not in self.columns.values()
        }
        from_, value = others.pop("from", None), others.pop("value", None)
        role, content = others.pop("role", from_), others.pop("content", None)
        if None not in (content, value) and content != value:
            raise wrong(name, f"has a turn of {role!r} with content and value: remove one")
        content = text_of(name, value if content is None else content)
        if not isinstance(role, str):
            raise wrong(name, f"has a turn without a role: give {SHAPES}")
        for key in sorted(others.keys() & REFUSED_IN_TURNS):
            if not is_empty(others[key]):
                raise wrong(name, f"has a turn of {role!r} with {key}, {_not_read(key)}")
        for key in REASONING:
            if not isinstance(others.get(key), str | None):
                raise wrong(name, f"has a turn of {role!r} whose {key} is no text")
        counts = _counts(name, role, others)
        role = self._role(name, role)
        calls = others.pop("tool_calls", None) or others.pop("function_call", None)
        others.pop("function_call", None)
        if role == CALL:
            role, (content, calls) = "assistant", _split_call(partial(wrong, name), content)
        if not isinstance(content, str) and not (content is None and calls):
            raise wrong(name, f"has a turn of {role!r} whose content is no text")
        message: Message = {"role": role, "content": content or ""}
        message |= {} if counts is None else {COUNTS: counts}
        message |= {key: value for key, value in others.items() if value is not None}
        if calls:
            message["tool_calls"] = calls_of(partial(wrong, name), calls, self.fills)
        return message

    def _role(self, name: str, role: str) -> str:
        """Returns the role's name in a chat template."""
        if role in self.role_names:
            return self.role_names[role]
        if known := ROLES.get(role.strip().lower()):
            return known
        allowed = ", ".join(sorted(ROLES))
        raise wrong(
            name,
            f"has a turn of the role {role!r}, which no server uses: give one of {allowed}, or name"
            f" its role in data.source.role_names, as {{{role}: user}}",
        )

    def tools(self, name: str, record: Record) -> list[dict[str, Any]]:
        """Returns the tools of a record: a list or JSON, of objects or JSON; OpenAI's older
        `functions` too."""
        found = []
        for key in ("tools", "functions"):
            if key in self.ignored or is_empty(given := record.get(key)):
                continue
            fail = partial(wrong, name)
            given = _parsed(fail, key, given)
            for tool in given if isinstance(given, list) else [given]:
                tool = _parsed(fail, key, tool)
                if not isinstance(tool, dict):
                    raise wrong(name, f"has {key} of which one is no object: {str(tool)[:50]}")
                tool = without_nulls(tool) if self.fills else tool
                found.append({"type": "function", "function": tool} if key != "tools" else tool)
        return found

    def with_system(self, name: str, record: Record, messages: list[Message]) -> list[Message]:
        """Returns the messages after the `system` that is beside them in a record."""
        if "system" in self.ignored or is_empty(system := record.get("system")):
            return messages
        system = text_of(name, system)
        if not isinstance(system, str):
            raise wrong(name, "has a system that is no text")
        if messages and messages[0]["role"] in ("system", "developer"):
            if messages[0]["content"].strip() == system.strip():
                return messages
            raise wrong(
                name,
                "has a system prompt beside its turns and another one among them: remove one, or"
                " add system to data.source.ignored",
            )
        return [{"role": "system", "content": system}, *messages]

    def check_keys(self, name: str, record: Record, read: Iterable[str], kind: str) -> list[str]:
        """Returns the keys that nothing reads and that mean nothing to training. Raises InputError
        if a key of `REFUSED` is not among those that are read."""
        known = {*read, *self.ignored, *self.columns.values()}
        unread = [key for key, value in record.items() if key not in known and not is_empty(value)]
        # of other labels, such as a topic, nothing depends
        refused = sorted(REFUSED & {*unread})
        if "label" in unread and isinstance(record["label"], bool):  # of good and bad answers
            refused.append("label")
        if refused:
            raise wrong(name, f"has {refused[0]}, {_not_read(refused[0], kind)}")
        return unread


def _not_read(key: str, kind: str = "Chat") -> str:
    hint = " or give it another name in data.source.columns," if key.startswith("system") else ""
    if key in MEDIA:
        hint = " it is no text,"
    return (
        f"which data.source {kind} does not read in this place:{hint} remove it, or add {key} to"
        " data.source.ignored if it may be lost"
    )


def _counts(name: str, role: str, others: Record) -> bool | None:
    """Returns whether a message says that it counts, by any of the keys that mean this, which are
    removed from it."""
    said = {key: others.pop(key) for key in WEIGHTS if key in others}
    said = {key: value for key, value in said.items() if value is not None}
    for key, value in said.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise wrong(
                name,
                f"has a turn of {role!r} with {key} {value!r}: give 0 or 1, or train true or false",
            )
    if len({bool(value) for value in said.values()}) > 1:
        raise wrong(name, f"has a turn of {role!r} with {said}, which contradict each other")
    return next((bool(value) for value in said.values()), None)


def _split_call(fail: Fail, text: object) -> tuple[str, object]:
    """Returns reasoning or other text before the JSON of calls, and the calls."""
    if not isinstance(text, str):
        return "", text
    before, end, after = text.rpartition("</think>")
    return before + end, _parsed(fail, "a function_call", after)


def calls_of(fail: Fail, calls: object, fills: bool = False) -> list[dict[str, Any]]:
    """Returns calls in OpenAI's form, `{"type": "function", "function": {name, arguments}}`, with
    arguments as an object: a chat template encodes them."""
    calls = _parsed(fail, "tool_calls", calls)
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        call = _parsed(fail, "tool_calls", call)
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise fail("has a tool call without a name: give {name, arguments}")
        arguments = function.get("arguments", function.get("parameters"))
        for _ in range(2):  # some data sets encode them twice
            if isinstance(arguments, str) and arguments.strip():
                arguments = _parsed(fail, f"arguments of {function['name']}", arguments)
        if fills:
            arguments = without_nulls(arguments)
        if is_empty(arguments):
            arguments = {}
        if not isinstance(arguments, dict):
            raise fail(f"has a call of {function['name']} whose arguments are no object: edit it")
        others = {} if function is call else call
        known = ("name", "arguments", "parameters", "id", "type")
        rest = {key: value for key, value in function.items() if key not in known}
        inner = {"name": function["name"], "arguments": arguments} | rest
        outer = {key: value for key, value in others.items() if key != "function"}
        if function is call and call.get("id") is not None:
            outer["id"] = call["id"]
        outer = {key: value for key, value in outer.items() if value is not None}
        found.append({"type": "function"} | outer | {"function": inner})
    return found


def _parsed(fail: Fail, what: str, value: object) -> Any:
    """Returns the value of a text of JSON; what is no text stays."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, strict=False)
    except ValueError as error:
        raise fail(f"has {what} that are not JSON: {error}") from error


def without_nulls(value: Any) -> Any:
    """Returns a JSON value without the keys that are null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


def renamed(record: Record, columns: dict[str, str]) -> Record:
    """Returns a record or message with the values of `columns` under our names as well."""
    return record | {ours: record[theirs] for ours, theirs in columns.items() if theirs in record}


def turns_of(name: str, turns: object) -> object:
    """Returns turns that are given as a text of JSON as a list; what is no text stays."""
    if not isinstance(turns, str):
        return turns
    try:
        found = json.loads(turns)
    except ValueError as error:
        raise wrong(name, f"has turns that are a text and not JSON: {error}") from error
    if not isinstance(found, list):
        raise wrong(name, "has turns that are a text of JSON, and no list")
    return found


def turns_of_alpaca(record: Record) -> list[Message]:
    """Returns the turns of Alpaca's shape: `input` follows `instruction` in a line of its own, as
    in LLaMA-Factory."""
    turns = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    asked = "\n".join(filter(None, [record["instruction"], record.get("input")]))
    for question, answer in [*(record.get("history") or []), (asked, record["output"])]:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return turns


def text_of(name: str, content: object) -> object:
    """Returns the text of a list of contents, as OpenAI's API has it; what is no list stays."""
    if not isinstance(content, list):
        return content
    return "".join(_text_of_part(name, part) for part in content)


def _text_of_part(name: str, part: object) -> str:
    if isinstance(part, str):
        return part
    refused = wrong(name, "has a content that is not only text, such as an image: remove it")
    if not isinstance(part, dict) or part.get("type", "text") not in TEXTS:
        raise refused
    texts = [part[key] for key in ("text", "value", "content") if part.get(key) is not None]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise refused
    if any(not is_empty(part.get(key)) for key in (*MEDIA, "image_url", "input_audio")):
        raise refused
    return texts[0]
