"""Chat and Preferences: conversations, with a loss on assistant turns alone; pairs of answers.

    data:
      source:
        class_path: Chat
        init_args: {paths: [chats/*.jsonl]}

A document is one conversation as JSON: `messages`, and `tools` where the record has some; or one
pair: `prompt`, `chosen` and `rejected`, all texts or all lists of messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ...errors import InputError, first_line
from ..tokenizers import TokenizerSpec
from .chat_template import encode, training_template
from .documents import Documents, Encoded, Source
from .records import Record, hub_records, json_records, matching, parquet_records, wrong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer

Message = dict[str, Any]  # role and content, and what else a turn has, such as tool_calls
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
ANSWERS = ("chosen", "rejected")
AFTER = {  # role -> the roles that it may follow; None: the conversation's start
    "system": (None,),
    "user": (None, "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


@dataclass
class Chat(Source):
    """Conversations; only the assistant's turns contribute to the loss.

    A record has `messages` with role and content, `conversations` with from and value, or `prompt`
    and `completion`; `system` and `tools` may be beside them.

    Args:
        paths: Files or glob patterns: jsonl or JSON arrays, also .gz and .zst, or .parquet.
        name: In place of `paths`, a data set of the Hugging Face hub, or a folder in its format.
        config: The data set's configuration. null: its default.
        split: The data set's split to read; train, validation and test splits are made from it.
        revision: The commit or tag of the data set to read. null: the newest.
        train_on: The tokens that count in the loss. assistant: all assistant turns. last: the last
            assistant turn. all: every token.
        template: A .jinja file of a chat template with `{% generation %}` around the assistant's
            turns. null: the tokenizer's, in trl's form for the family if it has none of these tags.
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

    def __post_init__(self) -> None:
        if bool(self.paths) == bool(self.name):
            raise InputError(
                f"data.source {type(self).__name__} needs either paths, of files, or name, of a data set of the hub"
            )

    def documents(self) -> Iterator[tuple[str, str]]:
        readers: dict[str, Iterator[Record]] = {}
        if self.name:
            options = {"split": self.split, "streaming": True, "revision": self.revision}
            readers[self.name] = hub_records(self.name, self.config, **options)
        for path in matching(self.paths):
            is_table = path.suffix == ".parquet"
            reader = parquet_records(path, self.fields) if is_table else json_records(path)
            readers[str(path)] = reader
        first_name, first_shape = "", ""
        for origin, records in readers.items():
            name = ""
            for name, record in records:
                shape = self.shape_of(name, record)
                first_name, first_shape = first_name or name, first_shape or shape
                if shape != first_shape:
                    first = f"{first_name} has {self.shapes[first_shape]}"
                    what = f"has {self.shapes[shape]}, and {first}: give one shape in one source"
                    raise wrong(name, what)
                yield name, json.dumps(self.document_of(name, record, shape), ensure_ascii=False)
            if not name:
                raise wrong(origin, "is empty: remove it from the source")

    def shape_of(self, name: str, record: object) -> str:
        """Returns the key of `shapes` that the record has."""
        fields = record if isinstance(record, dict) else {}
        known = {key for key, value in fields.items() if value is not None}
        for shape in SHAPES:
            if shape in known and (shape != "prompt" or "completion" in known):
                return shape
        given = ", ".join(sorted(fields)) or "no key"
        raise wrong(name, f"has only {given}: give {'; or '.join(SHAPES.values())}")

    def document_of(self, name: str, record: Any, shape: str) -> dict[str, object]:
        """Returns a document's content, checked: `messages`, and `tools` if there are some."""
        messages = messages_of(name, record[shape], "user")
        if shape == "prompt":
            messages += messages_of(name, record["completion"], "assistant")
        if record.get("system") and (not messages or messages[0]["role"] != "system"):
            messages = messages_of(name, record["system"], "system") + messages
        check_roles(name, messages)
        tools = record.get("tools")
        try:
            tools = json.loads(tools) if isinstance(tools, str) and tools else tools
        except ValueError as error:
            raise wrong(name, f"has tools that are not JSON: {error}") from error
        return {"messages": messages, "tools": tools} if tools else {"messages": messages}

    def files(self) -> list[Path]:
        files = matching(self.paths)
        if self.template and not Path(self.template).is_file():
            raise InputError(f"data.source.template {self.template!r} is no file")
        return [*files, Path(self.template)] if self.template else files

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """Returns the tokenizer: it keeps its chat template, for serving; or it gets `template`."""
        template = training_template(tokenizer, self.template, self.train_on)
        tokenizer.chat_template = tokenizer.chat_template or template.text
        return tokenizer

    def encode(self, spec: TokenizerSpec, tokenizer: Tokenizer, documents: Documents) -> list[Encoded]:
        template = training_template(tokenizer, self.template, self.train_on)
        return encode(tokenizer, template, self.train_on, documents)

    def encode_prompt(self, tokenizer: Tokenizer, prompt: str) -> list[int]:
        """Returns the tokens of a conversation that starts with `prompt`, up to the answer."""
        user = [{"role": "user", "content": prompt}]
        rendered: Any = tokenizer.apply_chat_template(user, add_generation_prompt=True)
        return rendered["input_ids"]


def messages_of(name: str, turns: object, role: str) -> list[Message]:
    """Returns messages with role and content; a text is one message of `role`."""
    messages = []
    for turn in turns if isinstance(turns, list) else [{"role": role, "content": turns}]:
        others = dict(turn) if isinstance(turn, dict) else {}
        from_, value = others.pop("from", None), others.pop("value", None)
        role, content = others.pop("role", from_), others.pop("content", value)
        if not isinstance(role, str) or role not in ROLES:
            raise wrong(name, f"has a turn with role {role!r}: give one of {', '.join(ROLES)}")
        if not isinstance(content, str) and not (content is None and others.get("tool_calls")):
            raise wrong(name, f"has a turn of {role!r} whose content is no text")
        message = {"role": ROLES[role], "content": content or ""}
        message |= {key: value for key, value in others.items() if value is not None}
        messages.append(message)
    return messages


def check_roles(name: str, messages: list[Message]) -> None:
    before = None
    for message in messages:
        role = message["role"]
        if before not in AFTER[role]:
            raise wrong(
                name,
                f"has {role} after {before or 'nothing'}: after an optional system prompt, user"
                " and assistant must alternate, with tool results between",
            )
        before = role
    if not any(message["role"] == "assistant" for message in messages):
        raise wrong(name, "has no assistant turn, on which the model is trained: remove it")


class Preferences(Chat):
    """Pairs of a chosen and a rejected answer to a prompt; `model.preference` has their loss.

    A record has `prompt`, `chosen` and `rejected`: texts, which are joined as they are, or lists of
    messages, which the chat template renders. `chosen` and `rejected` may be full conversations.
    The arguments are Chat's, but all tokens of the answers count whatever `train_on` is.
    """

    pairs = True
    shapes = {
        "texts": "chosen and rejected as texts",
        "lists of messages": "chosen and rejected as lists of messages",
    }
    fields = ("prompt", *ANSWERS)

    def shape_of(self, name: str, record: object) -> str:
        fields = record if isinstance(record, dict) else {}
        for key in ANSWERS:
            if not fields.get(key):
                raise wrong(name, f"has no {key}: give prompt, chosen and rejected")
        is_text = isinstance(fields["chosen"], str)
        if is_text != isinstance(fields["rejected"], str):
            raise wrong(name, "has a text and a list of messages: give both answers in one form")
        return "texts" if is_text else "lists of messages"

    def document_of(self, name: str, record: Any, shape: str) -> dict[str, object]:
        prompt, chosen, rejected = map(record.get, self.fields)
        if chosen == rejected:
            raise wrong(name, "has equal answers, which teach nothing: remove it")
        if shape == "lists of messages":
            chosen = messages_of(name, chosen, "assistant")
            rejected = messages_of(name, rejected, "assistant")
            if chosen[0]["role"] == "assistant":  # else they are full conversations
                prompt = messages_of(name, prompt or [], "user")
                chosen, rejected = prompt + chosen, prompt + rejected
            start = _num_equal(chosen, rejected)
            for full in (chosen, rejected):
                check_roles(name, full)
                if len(full) == start or full[start]["role"] != "assistant":
                    what = "has answers that do not start with an assistant's turn: edit them"
                    raise wrong(name, what)
            prompt, chosen, rejected = chosen[:start], chosen[start:], rejected[start:]
        if not prompt or isinstance(prompt, str) != (shape == "texts"):
            raise wrong(name, "has no prompt in the form of its answers: give one")
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        if self.template and not tokenizer.chat_template:
            tokenizer.chat_template = training_template(tokenizer, self.template, "all").text
        return tokenizer

    def encode_prompt(self, tokenizer: Tokenizer, prompt: str) -> list[int]:
        if not tokenizer.chat_template:
            return tokenizer.encode(prompt)
        return super().encode_prompt(tokenizer, prompt)

    def encode(self, spec: TokenizerSpec, tokenizer: Tokenizer, documents: Documents) -> list[Encoded]:
        """Returns the tokens of both sequences of each pair, and which are an answer's.

        The answers start where one of them differs from the prompt alone. That may be before the
        prompt's end (as in trl): a tokenizer may join its last characters with an answer's first.
        The first token of a sequence is no label.
        """
        # a text source that shares the tokenizer sets it
        tokenizer.backend_tokenizer.encode_special_tokens = False
        encoded = []
        for name, text in documents:
            pair = json.loads(text)
            prompt, end = pair["prompt"], tokenizer.eos_token
            is_text = isinstance(prompt, str)
            if is_text:
                rendered = [prompt]
                rendered += (prompt + pair[key].removesuffix(end) + end for key in ANSWERS)
            else:
                rendered = self._rendered(tokenizer, name, pair)
            ids = tokenizer(rendered, add_special_tokens=is_text)["input_ids"]
            prompt, chosen, rejected = ids
            start = max(1, min(_num_equal(prompt, chosen), _num_equal(prompt, rejected)))
            if min(len(chosen), len(rejected)) <= start or chosen == rejected:
                raise wrong(name, "has an answer without a token of its own: edit it")
            counted = np.concatenate([np.arange(len(chosen)), np.arange(len(rejected))]) >= start
            encoded.append(Encoded(np.array(chosen + rejected), counted))
        return encoded

    def _rendered(self, tokenizer: Tokenizer, name: str, pair: dict[str, list]) -> list[Any]:
        """Returns the prompt, and the prompt with each answer, rendered by the chat template."""
        template = training_template(tokenizer, self.template, "all")
        render = partial(tokenizer.apply_chat_template, chat_template=template.text, tokenize=False)
        prompt = pair["prompt"]
        try:
            rendered = [render(prompt, add_generation_prompt=True)]
            return [*rendered, *(render(prompt + pair[key]) for key in ANSWERS)]
        except Exception as error:  # a template raises errors of Jinja and of Python
            raise wrong(name, f"is refused by {template.name}: {first_line(error)}") from error


def _num_equal(first: Sequence[object], second: Sequence[object]) -> int:
    """Returns the length of the common start."""
    num = 0
    while num < min(len(first), len(second)) and first[num] == second[num]:
        num += 1
    return num
