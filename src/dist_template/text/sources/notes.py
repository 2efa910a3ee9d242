"""Notes: what `prepare` reports about the conversations of a source besides their tokens.

A source counts while its documents are read (`count`, `drop`), the cache's manifest keeps the
counts (`as_json`), and `prepare` prints them (`describe`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from .turns import COUNTS, REASONING, Message

WIDTH = 60  # characters that are shown of a turn


@dataclass
class Notes:
    """Counts kinds of turns, keys that nothing reads, and records that were left out by choice; has
    the first example of each."""

    turns: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, tuple[str, str]] = field(default_factory=dict)  # name and text of a kind

    def count(self, name: str, messages: Iterable[Message], tools: list[Any] | None = None) -> None:
        """Counts the turns of a conversation by their kinds."""
        for message in messages:
            kind = kind_of(message)
            self.turns[kind] += 1
            if kind not in self.examples:
                self.examples[kind] = (name, text_of_turn(message))
        if tools:
            self.turns["(tools)"] += 1
            if "(tools)" not in self.examples:
                names = [str(tool.get("function", tool).get("name")) for tool in tools]
                self.examples["(tools)"] = (name, _short(", ".join(names)))

    def drop(self, name: str, reason: str) -> None:
        self.dropped[reason] += 1
        self.examples.setdefault(f"dropped: {reason}", (name, ""))

    def as_json(self) -> dict[str, Any]:
        return {
            "turns": dict(self.turns),
            "unread": dict(self.unread),
            "dropped": dict(self.dropped),
            "examples": {kind: list(example) for kind, example in self.examples.items()},
        }


def kind_of(message: Message) -> str:
    """Returns the kind of a message: its role, and what it has besides a text."""
    kind = message["role"]
    if message.get("tool_calls"):
        kind += " with a tool call" if message.get("content") else ", a tool call"
    text = message.get("content") or ""
    reasons = kind.startswith("assistant") and "</think>" in text
    if reasons or any(message.get(key) for key in REASONING):
        kind += ", with reasoning"
    if COUNTS in message:
        kind += f", {COUNTS} {str(message[COUNTS]).lower()}"
    return kind


def text_of_turn(message: Message) -> str:
    """Returns the start of a message's text, or its first call, in one line."""
    if message.get("content"):
        return _short(message["content"])
    calls = message.get("tool_calls")
    if not calls:
        return ""
    function = calls[0]["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return _short(f"{function['name']}({arguments})")


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 2]} …"


def describe(notes: dict[str, Any]) -> list[str]:
    """Returns the lines of `prepare` about notes, as they are in a cache's manifest."""
    lines: list[str] = []
    turns, unread, examples = notes["turns"], notes["unread"], notes["examples"]
    if turns:
        width = max(20, max(map(len, turns)))
        lines.append(f"  {'turns':<{width}} {'number':>9}  the first of the kind")
        for kind, number in sorted(turns.items(), key=itemgetter(1), reverse=True):
            name, text = examples[kind]
            at = name.rpartition("/")[2]
            lines.append(f"  {kind:<{width}} {number:>9,}  {at}  {text}".rstrip())
    if unread:
        keys = ", ".join(f"{key} ({number:,})" for key, number in unread.items())
        lines.append(f"  keys that are not read, and the records that have them: {keys}")
    for reason, number in notes["dropped"].items():
        name, _ = examples[f"dropped: {reason}"]
        lines.append(f"  {number:,} records dropped (data.source.on_lost): {reason}; first {name}")
    return lines
