"""Chat: a source of conversations, of which the assistant's turns are trained on.

    data:
      source:
        class_path: Chat
        init_args: {paths: [chats/*.jsonl]}

A document of it is one conversation as JSON: `messages`, and `tools` where the record has some.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from ...errors import InputError
from ..tokenizers import TokenizerSpec
from .chat_template import encode, training_template
from .documents import Encoded, Source
from .paths import matching
from .records import Record, hub_records, json_records, parquet_records, wrong

SHAPES = {  # the key that a record is recognised by -> the shape's keys
    "messages": "messages: [{role, content}, …]",
    "conversations": "conversations: [{from, value}, …]",
    "prompt": "prompt and completion",
}
FIELDS = (*SHAPES, "completion", "system", "tools")
ROLES = {  # role in the data -> role in the template
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant",
    "tool": "tool", "observation": "tool",
}  # fmt: skip
AFTER = {  # role -> the roles that it may follow; None: the conversation's start
    "system": (None,),
    "user": (None, "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


@dataclass
class Chat(Source):
    """Conversations, of which the assistant's turns are trained on.

    A record has `messages` with role and content, `conversations` with from and value, or `prompt`
    and `completion`; `system` and `tools` may be beside them.

    Args:
        paths: Files or glob patterns: jsonl or JSON arrays, also .gz and .zst, or .parquet.
        name: In place of `paths`, a data set of the Hugging Face hub, or a folder in its format.
        config: The data set's configuration. null: its default.
        split: The data set's split to read; train, validation and test splits are made from it.
        revision: The commit or tag of the data set to read. null: the newest.
        train_on: The tokens that count in the loss. assistant: those of all assistant turns. last:
            those of the last one. all: every token.
        template: A .jinja file of a chat template with `{% generation %}` around the assistant's
            turns. null: the tokenizer's, in trl's form for the family if it has none of these tags.
        follow_links: Read links that a pattern matches and that lead out of the pattern's folder.
            false: refuse them.
    """

    whole = True
    shapes = SHAPES
    fields: ClassVar[tuple[str, ...]] = FIELDS

    paths: list[str] = field(default_factory=list)
    name: str | None = None
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    train_on: Literal["assistant", "last", "all"] = "assistant"
    template: str | None = None
    follow_links: bool = False

    def __post_init__(self) -> None:
        if bool(self.paths) == bool(self.name):
            raise InputError(
                f"data.source {type(self).__name__} needs either paths, of files, or name, of a"
                " data set of the hub"
            )

    def documents(self) -> Iterator[tuple[str, str]]:
        first: tuple[str, str] | None = None  # name and shape of the first record
        for origin, records in self._records():
            name = None
            for name, record in records:
                shape = self.shape_of(name, record)
                first = first or (name, shape)
                if shape != first[1]:
                    others = f"{first[0]} has {self.shapes[first[1]]}"
                    what = f"has {self.shapes[shape]}, and {others}: give one shape in one source"
                    raise wrong(name, what)
                document = self.document_of(name, record, shape)
                yield name, json.dumps(document, ensure_ascii=False)
            if name is None:
                raise wrong(origin, "is empty: remove it from the source")

    def shape_of(self, name: str, record: Any) -> str:
        """Returns the key of `shapes` that the record has."""
        fields = record if isinstance(record, dict) else {}
        for shape in SHAPES:
            needed = ("prompt", "completion") if shape == "prompt" else (shape,)
            if all(fields.get(key) is not None for key in needed):
                return shape
        known = ", ".join(sorted(fields)) or "no key"
        raise wrong(name, f"has only {known}: give {'; or '.join(SHAPES.values())}")

    def document_of(self, name: str, record: dict[str, Any], shape: str) -> dict[str, Any]:
        """Returns a document's content, checked: `messages`, and `tools` if there are some."""
        turns = _turns(record[shape], "user")
        if shape == "prompt":
            turns += _turns(record["completion"], "assistant")
        messages = [message_of(name, turn) for turn in turns]
        if record.get("system") and [message["role"] for message in messages][:1] != ["system"]:
            messages = [message_of(name, *_turns(record["system"], "system")), *messages]
        check_roles(name, messages)
        tools = record.get("tools")
        try:
            tools = json.loads(tools) if isinstance(tools, str) and tools else tools
        except ValueError as error:
            raise wrong(name, f"has tools that are not JSON: {error}") from error
        return {"messages": messages} | ({"tools": tools} if tools else {})

    def files(self) -> list[Path]:
        template = [Path(self.template)] if self.template else []
        if template and not template[0].is_file():
            raise InputError(f"data.source.template {self.template!r} is no file")
        return [*(matching(self.paths, self.follow_links) if self.paths else []), *template]

    def prepare_tokenizer(self, tokenizer: Any) -> Any:
        """Returns the tokenizer: it keeps its chat template, for serving; or it gets `template`."""
        template = training_template(tokenizer, self.template, self.train_on)
        tokenizer.chat_template = tokenizer.chat_template or template.text
        return tokenizer

    def encode(
        self, spec: TokenizerSpec, tokenizer: Any, documents: list[tuple[str, str]]
    ) -> list[Encoded]:
        template = training_template(tokenizer, self.template, self.train_on)
        return encode(tokenizer, template, self.train_on, documents)

    def encode_prompt(self, tokenizer: Any, prompt: str) -> list[int]:
        """Returns the tokens of a conversation that starts with `prompt`, up to the answer."""
        user = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(user, add_generation_prompt=True)["input_ids"]

    def _records(self) -> Iterator[tuple[str, Iterator[Record]]]:
        """Yields each file, or the data set, with its records."""
        if self.name:
            options = {"split": self.split, "streaming": True, "revision": self.revision}
            yield self.name, hub_records(self.name, self.config, None, **options)
            return
        for path in matching(self.paths, self.follow_links):
            is_table = path.suffix == ".parquet"
            records = parquet_records([path], self.fields) if is_table else json_records([path])
            yield str(path), records


def _turns(value: Any, role: str) -> list[Any]:
    return [*value] if isinstance(value, list) else [{"role": role, "content": value}]


def message_of(name: str, turn: Any) -> dict[str, Any]:
    """Returns a message with role and content, and what else it has, such as tool calls."""
    turn = turn if isinstance(turn, dict) else {}
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(name, f"has a turn with role {role!r}: give one of {', '.join(ROLES)}")
    if not isinstance(content, str) and not (content is None and turn.get("tool_calls")):
        raise wrong(name, f"has a turn of {role!r} whose content is no text")
    named = ("role", "from", "content", "value")
    others = {k: v for k, v in turn.items() if v is not None and k not in named}
    return {"role": ROLES[role], "content": content or "", **others}


def check_roles(name: str, messages: list[dict[str, Any]]) -> None:
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise wrong(name, "has no assistant turn, on which the model is trained: remove it")
    for before, role in zip([None, *roles], roles, strict=False):
        if before not in AFTER[role]:
            raise wrong(
                name,
                f"has {role} after {before or 'nothing'}: after an optional system prompt, user"
                " and assistant must alternate, with tool results between",
            )
