"""Chat and Preferences: conversations, with a loss on assistant turns alone; pairs of answers.

    data:
      source:
        class_path: Chat
        init_args: {paths: [chats/*.jsonl]}

A document is one conversation as JSON: `messages`, and `tools` where the record has some; or one
pair: `prompt`, `chosen` and `rejected`, all texts or all lists of messages. A message that says
whether it counts has `train`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ...errors import InputError, first_line
from ..tokenizers import TokenizerSpec
from .chat_template import COUNTS, NO_REASONING, Message, encode, training_template
from .documents import Documents, Encoded, Source
from .records import Named, Record, hub_records, matching, records_of, wrong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer

SHAPES = (
    "messages: [{role, content}, …]; conversations: [{from, value}, …]; prompt and completion; or "
    "instruction, input"
    " and output (other names: data.source.columns)"
)
# in a template
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "observation": "tool"}
ANSWERS = ("chosen", "rejected")


@dataclass
class Chat(Source):
    """Conversations; only the assistant's turns contribute to the loss.

    A record has `messages` with role and content, `conversations` with from and value, `prompt` and
    `completion`, or Alpaca's `instruction`, `input` and `output`, with `system` and `history`.
    `tools`, a list or JSON, may be beside them. A message with `train` false or `weight` 0 does not
    count, one with true or 1 does.

    Args:
        paths: Files or glob patterns: jsonl or JSON arrays, also .gz and .zst, or .parquet.
        name: In place of `paths`, a data set of the Hugging Face hub, or a folder in its format.
        config: The data set's configuration. null: its default.
        split: The data set's split to read; train, validation and test splits are made from it.
        revision: The commit or tag of the data set to read. null: the newest.
        columns: Other names of keys, of a record or a message, as {prompt: question, role:
            speaker}.
        train_on: The tokens that count in the loss. assistant: all turns of `roles`. last: the last
            of them. all: every token.
        roles: Whose turns count.
        template: A .jinja file of a chat template. null: the tokenizer's, or trl's form of it if
            earlier turns change when others follow. Tags of `{% generation %}` are read."""

    whole = True
    fields: ClassVar[tuple[str, ...]] = (
        "messages",
        "conversations",
        "prompt",
        "completion",
        "instruction",
        "input",
        "output",
        "system",
        "history",
        "tools",
    )

    paths: list[str] = field(default_factory=list)
    name: str | None = None
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    train_on: Literal["assistant", "last", "all"] = "assistant"
    roles: list[str] = field(default_factory=lambda: ["assistant"])
    template: str | None = None

    def __post_init__(self) -> None:
        if bool(self.paths) == bool(self.name):
            kind = type(self).__name__
            raise InputError(
                f"data.source {kind} needs either paths, of files, or name, of a data set of the"
                " hub"
            )

    def documents(self) -> Iterator[tuple[str, str]]:
        records: Iterator[Named] = iter(())
        if self.name:
            records = hub_records(self.name, self.config, self.split, self.revision)
        columns = [*self.fields, *self.columns.values()]
        for name, record in chain(
            records, *(records_of(path, columns) for path in matching(self.paths))
        ):
            document = self.document_of(name, renamed(record, self.columns))
            yield name, json.dumps(document, ensure_ascii=False)

    def document_of(self, name: str, record: Record) -> dict[str, object]:
        """Returns a document's content, checked: `messages`, and `tools` if there are some."""
        if turns := record.get("messages") or record.get("conversations"):
            messages = self._messages(name, turns, "user")
        elif record.get("prompt") and record.get("completion"):
            messages = self._messages(name, record["prompt"], "user")
            messages += self._messages(name, record["completion"], "assistant")
        elif record.get("instruction") and record.get("output"):
            messages = self._messages(name, turns_of_alpaca(record), "user")
        else:
            raise wrong(name, f"has only {', '.join(sorted(record)) or 'no key'}: give {SHAPES}")
        if not any(message.get(COUNTS, message["role"] in self.roles) for message in messages):
            who = " or ".join(self.roles)
            raise wrong(
                name, f"has no {who} turn that counts, on which the model is trained: remove it"
            )
        tools = record.get("tools")
        try:
            tools = json.loads(tools) if isinstance(tools, str) and tools else tools
        except ValueError as error:
            raise wrong(name, f"has tools that are not JSON: {error}") from error
        return {"messages": messages, "tools": tools} if tools else {"messages": messages}

    def _messages(self, name: str, turns: object, role: str) -> list[Message]:
        """Returns messages with role, content and, where the record says it, `train`; a text is one
        of `role`."""
        messages = []
        for turn in turns if isinstance(turns, list) else [{"role": role, "content": turns}]:
            others = renamed(turn, self.columns) if isinstance(turn, dict) else {}
            from_, value = others.pop("from", None), others.pop("value", None)
            role, content = others.pop("role", from_), text_of(name, others.pop("content", value))
            weight = others.pop("weight", None)
            counts = others.pop(COUNTS, weight)
            if not isinstance(role, str):
                raise wrong(name, f"has a turn without a role: give {SHAPES}")
            if not isinstance(content, str) and not (content is None and others.get("tool_calls")):
                raise wrong(name, f"has a turn of {role!r} whose content is no text")
            if counts not in (None, 0, 1):
                raise wrong(
                    name,
                    f"has a turn of {role!r} with weight {counts!r}: give 0 or 1, or train true or"
                    " false",
                )
            message = {"role": ROLES.get(role, role), "content": content or ""}
            message |= {} if counts is None else {COUNTS: bool(counts)}
            messages.append(
                message | {key: value for key, value in others.items() if value is not None}
            )
        return messages

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

    def encode(
        self, spec: TokenizerSpec, tokenizer: Tokenizer, documents: Documents
    ) -> list[Encoded]:
        template = training_template(tokenizer, self.template, self.train_on)
        return encode(tokenizer, template, self.train_on, self.roles, documents)

    def spans(self, tokenizer: Tokenizer, name: str, text: str) -> Iterator[tuple[str, np.ndarray]]:
        """Yields a conversation's tokens in spans: trained on, of prompts, or of answers with why
        they do not count."""
        template, talk = (
            training_template(tokenizer, self.template, self.train_on),
            json.loads(text),
        )
        (whole,) = encode(tokenizer, template, self.train_on, self.roles, [(name, text)])
        counted: Any = whole.counted
        kinds = np.where(counted, "trained on", "of prompts").astype(object)
        for why in ("not by train_on", "not by train or weight", "not by roles"):
            turns = []
            for turn in talk["messages"]:
                turns.append(
                    turn
                    | {COUNTS: turn["role"] == "assistant" and _why_not(turn, self.roles) == why}
                )
            alone = [(name, json.dumps(talk | {"messages": turns}))]
            with suppress(
                InputError
            ):  # there are none, or the template changes them when others follow
                (part,) = encode(tokenizer, template, "assistant", self.roles, alone)
                kinds[part.counted & ~counted] = why
        edges = np.flatnonzero(kinds[1:] != kinds[:-1]) + 1
        yield from zip(kinds[[0, *edges]], np.split(whole.ids, edges), strict=True)

    def encode_prompt(self, tokenizer: Tokenizer, prompt: str) -> list[int]:
        """Returns the tokens of a conversation that starts with `prompt`, up to the answer without
        reasoning."""
        if not tokenizer.chat_template:  # pairs of texts need none
            return tokenizer.encode(prompt)
        user = [{"role": "user", "content": prompt}]
        rendered: Any = tokenizer.apply_chat_template(
            user, add_generation_prompt=True, **NO_REASONING
        )
        return rendered["input_ids"]


def _why_not(turn: Message, roles: list[str]) -> str:
    """Returns why a turn is not trained on, if it is not."""
    if turn.get(COUNTS, turn["role"] in roles):
        return "not by train_on"
    return "not by train or weight" if COUNTS in turn else "not by roles"


def renamed(record: Record, columns: dict[str, str]) -> Record:
    """Returns a record or message with the values of `columns` under our names as well."""
    return record | {ours: record[theirs] for ours, theirs in columns.items() if theirs in record}


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
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise wrong(name, "has a content that is not only text, such as an image: remove it")
    return "".join(texts)


class Preferences(Chat):
    """Pairs of a chosen and a rejected answer to a prompt; `model.preference` has their loss.

    A record has `prompt`, `chosen` and `rejected`: texts, which are joined as they are, or lists of
    messages, which the chat template renders. `chosen` and `rejected` may be full conversations.
    The arguments are Chat's, but all tokens of the answers count whatever `train_on` is."""

    pairs = True
    fields = ("prompt", *ANSWERS)

    def document_of(self, name: str, record: Record) -> dict[str, object]:
        prompt, chosen, rejected = map(record.get, self.fields)
        if not chosen or not rejected or chosen == rejected:
            raise wrong(name, "needs chosen and rejected, two different answers")
        if isinstance(chosen, list) and isinstance(rejected, list):
            chosen = self._messages(name, chosen, "assistant")
            rejected = self._messages(name, rejected, "assistant")
            if chosen[0]["role"] == "assistant":  # else they are full conversations
                prompt = self._messages(name, prompt or [], "user")
                chosen, rejected = prompt + chosen, prompt + rejected
            start = _num_equal(chosen, rejected)
            prompt, chosen, rejected = chosen[:start], chosen[start:], rejected[start:]
            if any(
                [message["role"] for message in answer[:1]] != ["assistant"]
                for answer in (chosen, rejected)
            ):
                raise wrong(
                    name, "has answers that do not start with an assistant's turn: edit them"
                )
        if not prompt or {type(prompt), type(chosen), type(rejected)} not in ({str}, {list}):
            raise wrong(
                name, "needs prompt, chosen and rejected in one form: texts, or lists of messages"
            )
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        if self.template and not tokenizer.chat_template:
            tokenizer.chat_template = training_template(tokenizer, self.template, "all").text
        return tokenizer

    def encode(
        self, spec: TokenizerSpec, tokenizer: Tokenizer, documents: Documents
    ) -> list[Encoded]:
        """Returns the tokens of both sequences of each pair, and which are an answer's. The answers
        start where one of them differs from the prompt alone. That may be before the prompt's end
        (as in trl): a tokenizer may join its last characters with an answer's first. The first
        token of a sequence is no label."""
        # a text source that shares the tokenizer sets it
        tokenizer.backend_tokenizer.encode_special_tokens = False
        encoded = []
        for name, text in documents:
            pair = json.loads(text)
            prompt, end = pair["prompt"], tokenizer.eos_token
            is_text = isinstance(prompt, str)
            if is_text:
                rendered = [
                    prompt,
                    *(prompt + pair[key].removesuffix(end) + end for key in ANSWERS),
                ]
            else:
                rendered = self._rendered(tokenizer, name, pair)
            prompt, chosen, rejected = tokenizer(rendered, add_special_tokens=is_text)["input_ids"]
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
            return [
                render(prompt, add_generation_prompt=True),
                *(render(prompt + pair[key]) for key in ANSWERS),
            ]
        except Exception as error:  # a template raises errors of Jinja and of Python
            raise wrong(name, f"is refused by {template.name}: {first_line(error)}") from error


class Ratings(Preferences):
    """Answers that people found good or bad, each by itself; `model.preference.loss` kto has their
    loss.

    A record has `prompt`, `completion` and `label`, true or false; texts or messages as in
    Preferences. A document is stored as a pair: the answer, and another record's answer to the same
    prompt, by which the loss estimates the model's distance from its reference. Whether the first
    token counts, which is no label, is `label`."""

    ratings = True
    fields = ("prompt", "completion", "label")

    def documents(self) -> Iterator[tuple[str, str]]:
        labels = set[bool]()
        for name, text in super().documents():
            labels.add(json.loads(text)["label"])
            yield name, text
        if len(labels) == 1:
            raise InputError(
                f"data.source Ratings has only answers of label {str(*labels).lower()}: give both"
                " kinds"
            )

    def document_of(self, name: str, record: Record) -> dict[str, object]:
        prompt, completion, label = map(record.get, self.fields)
        if not isinstance(label, bool):
            raise wrong(name, f"needs label, true or false, and has {label!r}")
        if isinstance(completion, list):
            prompt = self._messages(name, prompt or [], "user")
            completion = self._messages(name, completion, "assistant")
        if not prompt or not completion or {type(prompt), type(completion)} not in ({str}, {list}):
            raise wrong(
                name, "needs prompt and completion in one form: texts, or lists of messages"
            )
        return {"prompt": prompt, "completion": completion, "label": label}

    def encode(
        self, spec: TokenizerSpec, tokenizer: Tokenizer, documents: Documents
    ) -> list[Encoded]:
        """Returns tokens of pairs: the other answer is the last before with another text, over the
        batch (trl)."""
        rated, pairs = [json.loads(text) for _, text in documents], []
        for number, (name, _) in enumerate(documents):
            completion = rated[number]["completion"]
            before = (rated[number - back]["completion"] for back in range(1, len(rated)))
            other = next(
                (each for each in before if type(each) is type(completion) and each != completion),
                None,
            )
            if other is None:
                raise wrong(
                    name, "has the only answer among its neighbours: give other answers too"
                )
            pair = {"prompt": rated[number]["prompt"], "chosen": completion, "rejected": other}
            pairs.append((name, json.dumps(pair)))
        encoded = super().encode(spec, tokenizer, pairs)
        for one, document in zip(rated, encoded, strict=True):
            counted: Any = document.counted
            counted[0] = one["label"]
        return encoded


def _num_equal(first: Sequence[object], second: Sequence[object]) -> int:
    """Returns the length of the common start."""
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return len([*equal])
