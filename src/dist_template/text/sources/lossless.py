"""Finds what a chat template does not write of a conversation, and the form in which it writes all.

Published templates drop what they do not know without an error: a second system turn, tools, a tool
call, reasoning. What a conversation says is divided into pieces: texts of turns, reasoning, names
and arguments of calls, names of tools and of their parameters. Two checks find those that are gone:

    skeleton   the conversation with another mark in place of each piece is rendered, and each mark
               has to be there. It depends on the structure alone, so that one rendering serves all
               conversations of that structure, and short texts cannot be confused with others.
    text       each piece has to be in the rendered conversation, where a template may strip or
               escape it: what is cut out because of its content, such as <think>, is found here.

Templates expect different forms of the same call, so the forms are tried in a fixed order, and the
first that writes each piece once is used. All of this holds for training and for serving."""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from ...errors import InputError
from .turns import REASONING, Message

Tools = list[Any]  # of objects
Render = Callable[[list[Message], Tools | None], str]
MARK = "zq{:04d}x"  # survives trimming, JSON and HTML escapes
THOUGHT = re.compile(r"^(\s*(?:<think>)?)(.*?)(</think>\s*)(.*)$", re.DOTALL)
# Tags around a text by which templates tell turns apart, such as <tool_response>.
TAGGED = re.compile(r"^(<[^<>\s]+>)(.*)(</[^<>\s]+>\s*)$", re.DOTALL)
# What is the same text before and after escapes of JSON: white space and backslashes do not count.
IGNORED = re.compile(r"\\[nrt]|\\|\s")
ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")
SWITCHES = re.compile(r"/(no_)?think\b")  # in a prompt they are read by templates, and removed
NAME = "an argument's name"  # kind of a piece
MOST_CHANGES = 3  # of a form: more are not tried
LARGEST = 2**22  # characters of skeletons that are remembered


class Piece(NamedTuple):
    """Something that a conversation says."""

    mark: str  # its place in the skeleton; "" if a mark cannot replace it
    text: str
    kind: str  # for the counts of `prepare`
    what: str  # for a message
    message: int | None = None  # number of its message from 0; None: a tool
    is_reasoning: bool = False


class Form(NamedTuple):
    """How a conversation is given to a template."""

    arguments_are_text: bool = False  # of a call: JSON in place of an object
    wraps_tools: bool = False  # {"type": "function", "function": tool}
    empties_are_missing: bool = False  # no `content` where a call has no text
    developer: str = ""  # another role of its turns: OpenAI's newer name of system
    reasoning: str = ""  # another key of a message's reasoning
    has_parts: bool = False  # contents are lists of parts, as templates of models with images read
    lists_tools: bool = False  # [] in place of null, where there are none


class Lost(InputError):
    """A template does not write a piece of a conversation."""

    def __init__(self, sentence: str, kind: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class Fitted(NamedTuple):
    """A conversation in the form that its template writes, and its pieces."""

    messages: list[Message]
    tools: Tools | None
    pieces: list[Piece]


class Completeness:
    """Fits conversations to one template, and remembers its answers by their structure.

    Args:
        render: Renders messages and tools as a text."""

    def __init__(self, render: Render) -> None:
        self.render, self._size = render, 0
        self._known: dict[str, tuple[Form, list[int]]] = {}

    def fit(self, messages: list[Message], tools: Tools | None, trained: Collection[int]) -> Fitted:
        """Returns the conversation in the form in which nothing is lost. `trained`: numbers of the
        messages whose reasoning must be written. Raises Lost if there is no such form."""
        skeleton, pieces = _skeleton(messages, tools)
        key = json.dumps([skeleton, sorted(trained)])
        if key not in self._known:
            self._size += len(key)
            if self._size > LARGEST:
                self._known, self._size = {}, len(key)
            self._known[key] = self._best(*skeleton, pieces, trained)
        form, lost = self._known[key]
        if lost:
            raise _lost(pieces[lost[0]])  # the first
        return Fitted(*in_form(messages, tools, form), pieces)

    def _best(
        self,
        messages: list[Message],
        tools: Tools | None,
        pieces: list[Piece],
        trained: Collection[int],
    ) -> tuple[Form, list[int]]:
        """Returns the first form in which nothing is lost, or else the first that is rendered, and
        the numbers of the pieces that are lost then."""
        best: tuple[Form, list[int]] | None = None
        for form in forms_of(messages, tools):
            try:
                text = self.render(*in_form(messages, tools, form))
            except Exception:  # a template raises errors of Jinja and of Python
                continue
            lost = []
            for number, piece in enumerate(pieces):
                has_to_be = piece.mark and _is_needed(piece, trained)
                if has_to_be and not _is_written(piece, text):
                    lost.append(number)
            # some templates write a content that is missing as Python's None
            if form.empties_are_missing and not lost and "None" in text:
                continue
            if not lost:
                return form, []
            if best is None or len(lost) < len(best[1]):
                best = form, lost
        if best is None:  # the template's own error is raised when the conversation is rendered
            return Form(), []
        return best


def check_text(
    pieces: list[Piece], text: str, trained: Collection[int], only: int | None = None
) -> None:
    """Raises Lost if a piece is not in the rendered text; with `only`, a piece of that message."""
    plain = ""
    for piece in pieces:
        if not _is_needed(piece, trained) or (only is not None and piece.message != only):
            continue
        if piece.text.strip() in text:
            continue
        if not plain:  # it takes time, and most pieces do not need it
            plain = plain_of(text)
        if plain_of(piece.text) not in plain:
            raise _lost(piece)


def plain_of(text: str) -> str:
    """Returns a text without what escapes and trimming change."""
    text = SWITCHES.sub("", text)
    if "\\u" in text:  # a character beyond 16 bits is escaped as a pair of surrogates
        text = ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if "&" in text:
        text = html.unescape(text)
    return IGNORED.sub("", text)


def _lost(piece: Piece) -> Lost:
    return Lost(piece.what, piece.kind)


def _is_needed(piece: Piece, trained: Collection[int]) -> bool:
    """Returns whether a piece must be written: a server's prompt has no earlier reasoning."""
    return not piece.is_reasoning or piece.message in trained


def _is_written(piece: Piece, text: str) -> bool:
    """Returns whether a mark is in a text; the name of an argument as JSON or bare, not encoded
    twice, nor as Python writes it."""
    if piece.mark not in text:
        return False
    if piece.kind != NAME:  # in calls that are Python, objects inside arguments are Python's too
        return True
    return f'\\"{piece.mark}' not in text and f"'{piece.mark}'" not in text


def text_in(message: Message) -> str:
    """Returns the text of a message's content, which may be in parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)


# ---- pieces --------------------------------------------------------------------------------------


class _Marks:
    """Replaces texts by marks, and collects the pieces."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._ids: dict[object, str] = {}

    def add(self, text: str, kind: str, what: str, message: int | None = None, **more: bool) -> str:
        """Returns the mark in place of a text; one without letters stays as it is."""
        if not text.strip():
            return text
        mark = MARK.format(len(self.pieces))
        self.pieces.append(Piece(mark, text, kind, what, message, **more))
        return mark

    def id_of(self, value: Any) -> Any:
        """Returns an id of the same length, the same for the same id."""
        if not isinstance(value, str):
            return value
        if value not in self._ids:
            number = str(len(self._ids)).zfill(len(value))
            self._ids[value] = number[-len(value) :]
        return self._ids[value]

    def arguments(self, value: Any, call: str, number: int, kind: str = NAME) -> Any:
        """Returns the arguments of a call with marks in place of names, texts and numbers."""
        where = f"of the call {call} in message {number + 1}"
        if isinstance(value, dict):
            marked = {}
            for key, inner in value.items():
                mark = self.add(str(key), kind, f"the argument {key} {where}", number)
                marked[mark] = self.arguments(inner, call, number, "a key in an argument")
            return marked
        if isinstance(value, list):
            return [self.arguments(inner, call, number, "a key in an argument") for inner in value]
        kind, what = "an argument's value", f"an argument's value {str(value)[:40]!r} {where}"
        if isinstance(value, str):
            return self.add(value, kind, what, number)
        if isinstance(value, bool) or value is None:
            return value
        # a number stays one, of its type, which a template may check
        stand_in: float = 7_300_000 + len(self.pieces)
        if isinstance(value, float):
            stand_in += 0.5
        self.pieces.append(Piece(str(stand_in), json.dumps(value), kind, what, number))
        return stand_in


def _skeleton(
    messages: list[Message], tools: Tools | None
) -> tuple[tuple[list[Message], Tools | None], list[Piece]]:
    """Returns a conversation with a mark in place of each piece, and the pieces."""
    marks = _Marks()
    turns = [_marked(marks, message, number) for number, message in enumerate(messages)]
    if tools:  # [] and null stay what they are
        tools = [_marked_tool(marks, tool) for tool in tools]
    return (turns, tools), marks.pieces


def _marked(marks: _Marks, message: Message, number: int) -> Message:
    marked: Message = {}
    for key, value in message.items():
        if key == "content":
            marked[key] = _marked_content(marks, message, number)
        elif key in REASONING and isinstance(value, str):
            marked[key] = _marked_reasoning(marks, value, number)
        elif key == "tool_calls":
            marked[key] = [_marked_call(marks, call, number) for call in value]
        elif key in ("tool_call_id", "id"):
            marked[key] = marks.id_of(value)
        elif key == "name" and message["role"] == "tool":  # the call has it too
            marked[key] = "zqname"
        else:
            marked[key] = value
    return marked


def _marked_reasoning(marks: _Marks, text: str, number: int) -> str:
    what = f"the reasoning of message {number + 1}, which is trained on"
    return marks.add(text, "reasoning", what, number, is_reasoning=True)


def _marked_content(marks: _Marks, message: Message, number: int) -> Any:
    text, role = message.get("content"), message["role"]
    if not isinstance(text, str):
        return text
    kind = f"the text of a turn of {role}"
    what = f"the text of message {number + 1} ({role})"
    thought = None
    if role == "assistant":
        thought = THOUGHT.match(text)
    if thought:
        start, reasoning, end, answer = thought.groups()
        start += _marked_reasoning(marks, reasoning, number) + end
        return start + marks.add(answer, kind, what, number)
    tagged = TAGGED.match(text)
    if tagged:
        start, inner, end = tagged.groups()
        return start + marks.add(inner, kind, what, number) + end
    return marks.add(text, kind, what, number)


def _marked_call(marks: _Marks, call: dict[str, Any], number: int) -> dict[str, Any]:
    function = call["function"]
    name = function["name"]
    what = f"the call {name} in message {number + 1}"
    inner = dict(function)
    inner["name"] = marks.add(name, "a tool call", what, number)
    inner["arguments"] = marks.arguments(function["arguments"], name, number)
    marked = call | {"function": inner}
    if "id" in call:
        marked["id"] = marks.id_of(call["id"])
    return marked


def _marked_tool(marks: _Marks, tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool with marks in place of its name and those of its parameters."""
    function = tool.get("function")
    if isinstance(function, dict):
        return tool | {"function": _marked_tool(marks, function)}
    name = tool.get("name")
    if not isinstance(name, str):
        return tool
    marked = tool | {"name": marks.add(name, "a tool", f"the tool {name}")}
    schema = tool.get("parameters")
    if isinstance(schema, dict):
        marked["parameters"] = _marked_schema(marks, schema, name)
    return marked


def _marked_schema(marks: _Marks, schema: dict[str, Any], tool: str) -> dict[str, Any]:
    """Returns the JSON schema of a tool's parameters with marks in place of their names."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return schema
    names: dict[object, str] = {}
    for key in properties:
        what = f"the parameter {key} of the tool {tool}"
        names[key] = marks.add(key, "a tool's parameter", what)
    marked = dict(schema)
    marked["properties"] = {names[key]: value for key, value in properties.items()}
    required = schema.get("required")
    if isinstance(required, list):
        marked["required"] = []
        for key in required:
            is_known = isinstance(key, str) and key in names
            marked["required"].append(names[key] if is_known else key)
    return marked


# ---- forms ---------------------------------------------------------------------------------------


def forms_of(messages: list[Message], tools: Tools | None) -> Iterator[Form]:
    """Yields the forms of a conversation that differ, with the fewest changes first."""
    calling = [message for message in messages if message.get("tool_calls")]
    has_empty = any(not message.get("content") for message in calling)
    has_flat = any("function" not in tool for tool in tools or ())
    has_developer = any(message["role"] == "developer" for message in messages)
    reasons = any(message.get(key) for message in messages for key in REASONING)

    unchanged, either = (False,), (False, True)
    choices: list[tuple[Any, ...]] = [  # in the order of Form's fields
        either if calling else unchanged,
        either if has_flat else unchanged,
        either if has_empty else unchanged,
        ("", "system") if has_developer else ("",),
        ("", "reasoning") if reasons else ("",),
        either,
        unchanged if tools else either,
    ]
    forms = [Form(*values) for values in itertools.product(*choices)]
    for num_changes in range(MOST_CHANGES + 1):
        for form in forms:
            if sum(map(bool, form)) == num_changes:
                yield form


def in_form(
    messages: list[Message], tools: Tools | None, form: Form
) -> tuple[list[Message], Tools | None]:
    """Returns a conversation in a form; what changes is copied."""
    if form == Form():
        return messages, tools
    turns = [_message_in_form(message, form) for message in messages]
    if form.wraps_tools and tools:
        wrapped = []
        for tool in tools:
            if "function" not in tool:
                tool = {"type": "function", "function": tool}
            wrapped.append(tool)
        tools = wrapped
    if form.lists_tools and tools is None:
        tools = []
    return turns, tools


def _message_in_form(message: Message, form: Form) -> Message:
    message = dict(message)
    if form.developer and message["role"] == "developer":
        message["role"] = form.developer
    if form.reasoning:
        for key in REASONING:
            if message.get(key):
                message[form.reasoning] = message[key]
                break
    text = message.get("content")
    if form.has_parts and isinstance(text, str):
        message["content"] = [{"type": "text", "text": text}] if text else []
    calls = message.get("tool_calls")
    if calls and form.empties_are_missing and not message.get("content"):
        message.pop("content", None)
    if calls and form.arguments_are_text:
        message["tool_calls"] = [_with_arguments_as_text(call) for call in calls]
    return message


def _with_arguments_as_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": arguments}}
