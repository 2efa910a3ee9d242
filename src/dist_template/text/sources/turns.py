"""Reads the turns of published conversations as messages: role, content, and what else they say.

    OpenAI      {"role": "assistant", "content": null, "tool_calls": [{"function": {…}}]}, `weight`
    ShareGPT    {"from": "gpt", "value": …}, with function_call and observation (LLaMA-Factory)
    axolotl     `train` or `training`            ms-swift    `loss`

For each record, in this order:

    check_keys           a key that means something in another tool and is not read here is refused:
                         see `REFUSED`; keys that mean nothing to training, such as `id` and
                         `source`, are counted for `prepare`
    turns_of             its turns, which may be a text of JSON, or Alpaca's keys
    Reader.messages      each turn as a message: its keys are renamed, its role gets a template's
                         name, and its calls are parsed
    Reader.with_system   the system prompt beside the turns comes first
    Reader.tools         the tools, which may be JSON"""

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
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "chatbot": "assistant",
    "tool": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "ipython": "tool",
    "function_call": CALL,
    "tool_call": CALL,
    "system": "system",
    "developer": "developer",
}
TEXTS = ("text", "input_text", "output_text")  # types of a content's parts
REASONING = ("reasoning_content", "reasoning", "thinking")  # keys, as in transformers

# Keys of a message that say whether it counts: true or false, 1 or 0.
WEIGHTS = (COUNTS, "training", "trainable", "weight", "loss")
MEDIA = ("images", "image", "audios", "audio", "videos", "video", "documents", "objects")
# Masks and weights of a form that is not read; and contents that are no text.
REFUSED_IN_TURNS = {
    "mask",
    "masked",
    "loss_mask",
    "loss_weight",
    "loss_scale",
    "train_detail",
    "training_detail",
    "chat_template_kwargs",
}.union(MEDIA)
# The same of a record, and keys that mean training in another shape or tool.
REFUSED = {
    "system",
    "system_prompt",
    "system_message",
    "tools",
    "functions",
    "history",
    "chosen",
    "rejected",
    "rejected_response",
    "kto_tag",
    "enable_thinking",
}.union(REASONING, WEIGHTS, REFUSED_IN_TURNS)
# What a message may have; everything else is passed on to the template too, which may read it.
KNOWN = {"role", "content", "tool_calls", "tool_call_id"}.union(REASONING, WEIGHTS)


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
        others = {}  # keys, without those that are read here
        for key, value in renamed(turn, self.columns).items():
            if key not in self.ignored and key not in self.columns.values():
                others[key] = value

        # ShareGPT's names, then OpenAI's
        role = others.pop("from", None)
        role = others.pop("role", role)
        value = others.pop("value", None)
        content = others.pop("content", None)
        if content is None:
            content = value
        elif value is not None and content != value:
            raise wrong(name, f"has a turn of {role!r} with content and value: remove one")
        content = text_of(name, content)
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

        fail = partial(wrong, name)
        single_call = others.pop("function_call", None)  # OpenAI's older key
        calls = others.pop("tool_calls", None)
        if not calls:
            calls = single_call
        if role == CALL:
            role = "assistant"
            content, calls = _split_call(fail, content)
        is_call_alone = content is None and calls
        if not isinstance(content, str) and not is_call_alone:
            raise wrong(name, f"has a turn of {role!r} whose content is no text")

        message: Message = {"role": role, "content": content or ""}
        if counts is not None:
            message[COUNTS] = counts
        message |= _given(others)
        if calls:
            message["tool_calls"] = calls_of(fail, calls, self.fills)
        return message

    def _role(self, name: str, role: str) -> str:
        """Returns the role's name in a chat template."""
        if role in self.role_names:
            return self.role_names[role]
        usual = role.strip().lower()
        if usual in ROLES:
            return ROLES[usual]
        allowed = ", ".join(sorted(ROLES))
        raise wrong(
            name,
            f"has a turn of the role {role!r}, which no server uses: give one of {allowed}, or name"
            f" its role in data.source.role_names, as {{{role}: user}}",
        )

    def tools(self, name: str, record: Record) -> list[dict[str, Any]]:
        """Returns the tools of a record: a list or JSON, of objects or JSON; OpenAI's older
        `functions` too."""
        tools = []
        fail = partial(wrong, name)
        for key in ("tools", "functions"):
            if key in self.ignored or is_empty(record.get(key)):
                continue
            given = _parsed(fail, key, record[key])
            if not isinstance(given, list):
                given = [given]
            for tool in given:
                tool = _parsed(fail, key, tool)
                if not isinstance(tool, dict):
                    raise wrong(name, f"has {key} of which one is no object: {str(tool)[:50]}")
                if self.fills:
                    tool = without_nulls(tool)
                if key == "functions":
                    tool = {"type": "function", "function": tool}
                tools.append(tool)
        return tools

    def with_system(self, name: str, record: Record, messages: list[Message]) -> list[Message]:
        """Returns the messages after the `system` that is beside them in a record."""
        system = record.get("system")
        if "system" in self.ignored or is_empty(system):
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
        known = set(read).union(self.ignored, self.columns.values())
        unread = [key for key, value in record.items() if key not in known and not is_empty(value)]
        refused = sorted(REFUSED.intersection(unread))
        # true or false says whether an answer is good; another label, such as a topic, may be lost
        if "label" in unread and isinstance(record["label"], bool):
            refused.append("label")
        if refused:
            raise wrong(name, f"has {refused[0]}, {_not_read(refused[0], kind)}")
        return unread


def _not_read(key: str, kind: str = "Chat") -> str:
    hint = ""
    if key.startswith("system"):
        hint = " or give it another name in data.source.columns,"
    if key in MEDIA:
        hint = " it is no text,"
    return (
        f"which data.source {kind} does not read in this place:{hint} remove it, or add {key} to"
        " data.source.ignored if it may be lost"
    )


def _counts(name: str, role: str, others: Record) -> bool | None:
    """Returns whether a message says that it counts, by any of the keys that mean this, which are
    removed from it."""
    said = {}
    for key in WEIGHTS:
        value = others.pop(key, None)
        if value is not None:
            said[key] = value
    for key, value in said.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise wrong(
                name,
                f"has a turn of {role!r} with {key} {value!r}: give 0 or 1, or train true or false",
            )
    answers = {bool(value) for value in said.values()}
    if len(answers) > 1:
        raise wrong(name, f"has a turn of {role!r} with {said}, which contradict each other")
    return answers.pop() if answers else None


def _given(record: Record) -> Record:
    """Returns a record without the keys that are null."""
    return {key: value for key, value in record.items() if value is not None}


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
    if not isinstance(calls, list):
        calls = [calls]
    result = []
    for call in calls:
        call = _parsed(fail, "tool_calls", call)
        function = None
        if isinstance(call, dict):  # without `function`, the call is the function itself
            function = call.get("function", call)
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
        inner = {"name": function["name"], "arguments": arguments}
        for key, value in function.items():
            if key not in ("name", "arguments", "parameters", "id", "type"):
                inner[key] = value
        outer = {"id": call.get("id")} if function is call else dict(call)
        outer.pop("function", None)
        result.append({"type": "function"} | _given(outer) | {"function": inner})
    return result


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
        return {key: without_nulls(inner) for key, inner in _given(value).items()}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value


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
        parsed = json.loads(turns)
    except ValueError as error:
        raise wrong(name, f"has turns that are a text and not JSON: {error}") from error
    if not isinstance(parsed, list):
        raise wrong(name, "has turns that are a text of JSON, and no list")
    return parsed


def turns_of_alpaca(record: Record) -> list[Message]:
    """Returns the turns of Alpaca's shape: `input` follows `instruction` in a line of its own, as
    in LLaMA-Factory."""
    turns = []
    if record.get("system"):
        turns.append({"role": "system", "content": record["system"]})
    asked = [record["instruction"]]
    if record.get("input"):
        asked.append(record["input"])
    exchanges = list(record.get("history") or [])
    exchanges.append(("\n".join(asked), record["output"]))
    for question, answer in exchanges:
        turns.append({"role": "user", "content": question})
        turns.append({"role": "assistant", "content": answer})
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
    for key in (*MEDIA, "image_url", "input_audio"):
        if not is_empty(part.get(key)):
            raise refused
    return texts[0]
