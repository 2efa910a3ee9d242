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
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ...errors import InputError, first_line
from ..tokenizers import TokenizerSpec
from .chat_template import (
    NO_REASONING,
    completeness_of,
    encode,
    lost_in,
    refusal,
    training_template,
)
from .documents import Documents, Encoded, Source
from .lossless import Completeness, Lost, check_text
from .notes import Notes
from .records import Named, Record, hub_records, matching, records_of, wrong
from .turns import (
    COUNTS,
    REFUSED,
    SHAPES,
    Message,
    Reader,
    is_empty,
    renamed,
    turns_of,
    turns_of_alpaca,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer

ANSWERS = ("chosen", "rejected")
# The keys of each shape; the first that is there decides.
SHAPE_KEYS = (
    ("messages",),
    ("conversations",),
    ("completion", "prompt"),
    ("output", "instruction", "input", "history"),
)
BESIDE = ("system", "tools", "functions")  # are read with each shape


@dataclass
class Chat(Source):
    """Conversations; only the assistant's turns contribute to the loss.

    A record has `messages` with role and content, `conversations` with from and value, `prompt` and
    `completion`, or Alpaca's `instruction`, `input` and `output`, with `history`. `system` and
    `tools`, a list or JSON, may be beside them. A message with `train`, `training`, `weight` or
    `loss` false or 0 does not count, one with true or 1 does. What the template does not write of a
    record is refused, or drops the record (`on_lost`).

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
            earlier turns change when others follow. Tags of `{% generation %}` are read.
        role_names: Other names of roles, as {narrator: user}. Those of published data are known.
        ignored: Keys of a record or a message that are not read although they mean something to
            training, such as [images].
        on_lost: If the template does not write something that a record says, or refuses it: refuse
            ends `prepare`; drop leaves the record out, and `prepare` counts it."""

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
        "functions",
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
    role_names: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    on_lost: Literal["refuse", "drop"] = "refuse"

    def __post_init__(self) -> None:
        if bool(self.paths) == bool(self.name):
            kind = type(self).__name__
            raise InputError(
                f"data.source {kind} needs `paths` (files) or `name` (a data set of the hub), and"
                " not both"
            )
        self._notes = Notes()
        self._fills = False

    def documents(self) -> Iterator[tuple[str, str]]:
        self._notes = Notes()
        for name, record in self._records():
            record = renamed(record, self.columns)
            document = self.document_of(name, record)
            for key in self._unread(name, record):
                self._notes.unread[key] += 1
            yield name, json.dumps(document, ensure_ascii=False)

    def _records(self) -> Iterator[Named]:
        """Yields records by name. `_fills`: their format fills missing keys with null."""
        self._fills = bool(self.name)
        if self.name:
            yield from hub_records(self.name, self.config, self.split, self.revision)
        # of a table, the columns that are read, and those that must not be overlooked
        columns = {"label"}.union(self.fields, self.columns.values(), REFUSED)
        for path in matching(self.paths):
            self._fills = path.suffix == ".parquet"
            yield from records_of(path, columns)
            if self._fills:  # after it has been found to be one
                self._notes.unread.update(_other_columns(path, columns))

    @property
    def _reader(self) -> Reader:
        return Reader(self.columns, self.role_names, self.ignored, self._fills)

    def _unread(self, name: str, record: Record) -> list[str]:
        """Returns the keys that this record's shape does not read; refuses those that mean
        something to training."""
        read = self._keys_of(record) + BESIDE
        return self._reader.check_keys(name, record, read, type(self).__name__)

    def _keys_of(self, record: Record) -> tuple[str, ...]:
        """Returns the keys of the record's shape, which `document_of` has found to be there."""
        return next(keys for keys in SHAPE_KEYS if not is_empty(record.get(keys[0])))

    def spec(self) -> dict[str, object]:
        given = {key: value for key, value in vars(self).items() if not key.startswith("_")}
        return {"class": type(self).__name__, **given}

    def notes(self) -> dict[str, Any] | None:
        return self._notes.as_json()

    def document_of(self, name: str, record: Record) -> dict[str, object]:
        """Returns a document's content, checked: `messages`, and `tools` if there are some."""
        reader = self._reader
        turns = record.get("messages") or record.get("conversations")
        if turns:
            messages = reader.messages(name, turns_of(name, turns), "user")
        elif record.get("prompt") and record.get("completion"):
            messages = reader.messages(name, record["prompt"], "user")
            messages += reader.messages(name, record["completion"], "assistant")
        elif record.get("instruction") and record.get("output"):
            messages = reader.messages(name, turns_of_alpaca(record), "user")
        else:
            raise wrong(name, f"has only {', '.join(sorted(record)) or 'no key'}: give {SHAPES}")
        messages = reader.with_system(name, record, messages)
        if not any(_counts(message, self.roles) for message in messages):
            roles = " or ".join(self.roles)
            raise wrong(
                name, f"has no {roles} turn that counts, on which the model is trained: remove it"
            )
        tools = reader.tools(name, record)
        self._notes.count(name, messages, tools)
        document: dict[str, object] = {"messages": messages}
        if tools:
            document["tools"] = tools
        return document

    def files(self) -> list[Path]:
        files = matching(self.paths)
        if self.template:
            template = Path(self.template)
            if not template.is_file():
                raise InputError(f"data.source.template {self.template!r} is no file")
            files.append(template)
        return files

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """Returns the tokenizer: it keeps its chat template, for serving; or it gets `template`."""
        template = training_template(tokenizer, self.template, self.train_on)
        tokenizer.chat_template = tokenizer.chat_template or template.text
        return tokenizer

    def encode(
        self, spec: TokenizerSpec, tokenizer: Tokenizer, documents: Documents
    ) -> list[Encoded]:
        template = training_template(tokenizer, self.template, self.train_on)
        given = (tokenizer, template, self.train_on, self.roles, documents)
        return encode(*given, self._notes, drops=self.on_lost == "drop")

    def spans(self, tokenizer: Tokenizer, name: str, text: str) -> Iterator[tuple[str, np.ndarray]]:
        """Yields a conversation's tokens in spans: trained on, of prompts, or of answers with why
        they do not count."""
        template = training_template(tokenizer, self.template, self.train_on)
        given = (tokenizer, template, self.train_on, self.roles, [(name, text)])
        (whole,) = encode(*given, drops=self.on_lost == "drop")
        if not len(whole.ids):
            return
        counted: Any = whole.counted
        kinds = np.where(counted, "trained on", "of prompts").astype(object)
        # Once for each reason, the answers that it excludes are encoded as if they alone counted.
        conversation = json.loads(text)
        for reason in ("not by train_on", "not by train or weight", "not by roles"):
            turns = []
            for turn in conversation["messages"]:
                is_answer = turn["role"] == "assistant"
                is_excluded = is_answer and _why_not(turn, self.roles) == reason
                turns.append(turn | {COUNTS: is_excluded})
            alone = [(name, json.dumps(conversation | {"messages": turns}))]
            # there may be none, or the template changes them when others follow
            with suppress(InputError):
                (part,) = encode(tokenizer, template, "assistant", self.roles, alone)
                kinds[part.counted & ~counted] = reason
        edges = np.flatnonzero(kinds[1:] != kinds[:-1]) + 1
        yield from zip(kinds[[0, *edges]], np.split(whole.ids, edges), strict=True)

    def encode_prompt(self, tokenizer: Tokenizer, prompt: str) -> list[int]:
        """Returns the tokens of a conversation that starts with `prompt`, up to the answer without
        reasoning."""
        if not tokenizer.chat_template:  # pairs of texts need none
            return super().encode_prompt(tokenizer, prompt)
        user: list[Message] = [{"role": "user", "content": prompt}]
        tools: list[Any] | None = None
        asked: Any = NO_REASONING | {"add_generation_prompt": True}
        # some templates read a content in parts alone
        with suppress(Lost):
            template = tokenizer.get_chat_template()
            user, tools, _ = completeness_of(tokenizer, template, **asked).fit(user, None, ())
        rendered: Any = tokenizer.apply_chat_template(user, tools=tools, **asked)
        return rendered["input_ids"]


def _counts(turn: Message, roles: list[str]) -> bool:
    """Returns whether a turn counts, before `train_on` selects among those that do."""
    return turn.get(COUNTS, turn["role"] in roles)


def _why_not(turn: Message, roles: list[str]) -> str:
    """Returns why a turn is excluded from the loss."""
    if _counts(turn, roles):
        return "not by train_on"
    if COUNTS in turn:
        return "not by train or weight"
    return "not by roles"


def _other_columns(path: Path, read: set[str]) -> dict[str, int]:
    """Returns the columns of a table that are not read, with its number of records."""
    from pyarrow import parquet

    table = parquet.ParquetFile(path)
    others = set(table.schema_arrow.names) - read
    return dict.fromkeys(others, table.metadata.num_rows)


class Preferences(Chat):
    """Pairs of a chosen and a rejected answer to a prompt; `model.preference` has their loss.

    A record has `prompt`, `chosen` and `rejected`: texts, which are joined as they are, or lists of
    messages, which the chat template renders. `chosen` and `rejected` may be full conversations, or
    one message each beside `conversations` (LLaMA-Factory). `system` and `tools` may be beside
    messages. The arguments are Chat's, but all tokens of the answers count whatever `train_on`
    is."""

    pairs = True
    fields = ("prompt", *ANSWERS, "messages", "conversations", *BESIDE)

    def document_of(self, name: str, record: Record) -> dict[str, object]:
        prompt = record.get("prompt")
        chosen, rejected = record.get("chosen"), record.get("rejected")
        reader = self._reader
        if not chosen or not rejected or chosen == rejected:
            raise wrong(name, "needs chosen and rejected, two different answers")
        if isinstance(chosen, dict) and isinstance(rejected, dict) and not _is_plain(chosen):
            chosen, rejected = [chosen], [rejected]
            turns = record.get("messages") or record.get("conversations")
            if turns and turns is not prompt:  # they may have both names, by `columns`
                prompt = turns_of(name, turns)
        if isinstance(chosen, list) and isinstance(rejected, list):
            chosen = reader.messages(name, chosen, "assistant")
            rejected = reader.messages(name, rejected, "assistant")
            if chosen[0]["role"] == "assistant":  # else they are full conversations
                prompt = reader.messages(name, prompt or [], "user")
                chosen, rejected = prompt + chosen, prompt + rejected
            chosen = reader.with_system(name, record, chosen)
            rejected = reader.with_system(name, record, rejected)
            start = _num_equal(chosen, rejected)
            prompt, chosen, rejected = chosen[:start], chosen[start:], rejected[start:]
            for answer in (chosen, rejected):
                if not answer or answer[0]["role"] != "assistant":
                    raise wrong(
                        name, "has answers that do not start with an assistant's turn: edit them"
                    )
        if not prompt or not _in_one_form(prompt, chosen, rejected):
            raise wrong(
                name, "needs prompt, chosen and rejected in one form: texts, or lists of messages"
            )
        pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        return pair | self._beside(name, record, [prompt, chosen, rejected])

    def _keys_of(self, record: Record) -> tuple[str, ...]:
        keys = ("prompt", *ANSWERS)
        if isinstance(record["chosen"], dict):
            keys += ("messages", "conversations")
        return keys

    def _beside(self, name: str, record: Record, parts: list[Any]) -> dict[str, object]:
        """Returns the tools beside a pair, and counts its turns. Raises InputError if `system` or
        tools are beside texts, which have no place for them."""
        tools = self._reader.tools(name, record)
        if isinstance(parts[0], list):
            for part in parts:
                self._notes.count(name, part)
            self._notes.count(name, [], tools)
            return {"tools": tools} if tools else {}
        for key, given in (("system", record.get("system")), ("tools", tools)):
            if not is_empty(given) and key not in self.ignored:
                raise wrong(
                    name,
                    f"has {key} beside a prompt that is a text, which has no place for it: give"
                    f" lists of messages, or add {key} to data.source.ignored",
                )
        return {}

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
        encoded, completeness = [], None
        for name, text in documents:
            pair = json.loads(text)
            prompt = pair["prompt"]
            is_text = isinstance(prompt, str)
            if is_text:
                end = tokenizer.eos_token
                rendered = [prompt]
                for key in ANSWERS:
                    rendered.append(prompt + pair[key].removesuffix(end) + end)
            else:
                if completeness is None:
                    template = training_template(tokenizer, self.template, "all")
                    completeness = completeness_of(tokenizer, template.text)
                rendered = self._rendered(tokenizer, name, pair, completeness)
                if not rendered:
                    nothing = np.zeros(0, dtype=np.int64)
                    encoded.append(Encoded(nothing, nothing.astype(bool)))
                    continue
            prompt, chosen, rejected = tokenizer(rendered, add_special_tokens=is_text)["input_ids"]
            shared = min(_num_equal(prompt, chosen), _num_equal(prompt, rejected))
            start = max(1, shared)
            if min(len(chosen), len(rejected)) <= start or chosen == rejected:
                raise wrong(name, "has an answer without a token of its own: edit it")
            positions = np.concatenate([np.arange(len(chosen)), np.arange(len(rejected))])
            encoded.append(Encoded(np.array(chosen + rejected), positions >= start))
        return encoded

    def _rendered(
        self, tokenizer: Tokenizer, name: str, pair: dict[str, Any], completeness: Completeness
    ) -> list[Any]:
        """Returns the prompt, and the prompt with each answer, rendered by the chat template; []
        if the template loses something of it and such pairs are dropped."""
        template = training_template(tokenizer, self.template, "all")
        prompt, tools = pair["prompt"], pair.get("tools")
        answers: list[Any] = []
        try:
            for key in ANSWERS:
                trained = range(len(prompt), len(prompt) + len(pair[key]))
                fitted = completeness.fit(prompt + pair[key], tools, trained)
                answer = completeness.render(fitted.messages, fitted.tools)
                check_text(fitted.pieces, answer, trained)
                answers.append(answer)
            asked: Any = tokenizer.apply_chat_template(
                fitted.messages[: len(prompt)],
                tools=fitted.tools,
                chat_template=template.text,
                tokenize=False,
                add_generation_prompt=True,
            )
            return [asked, *answers]
        except Lost as lost:
            if self.on_lost == "drop":
                self._notes.drop(name, lost.kind)
                return []
            raise lost_in(name, template, lost) from lost
        except Exception as error:  # a template raises errors of Jinja and of Python
            if self.on_lost == "drop":
                self._notes.drop(name, refusal(error))
                return []
            raise wrong(name, f"is refused by {template.name}: {first_line(error)}") from error


def _is_plain(answer: dict[str, Any]) -> bool:
    """Returns whether an answer is no message."""
    return not answer.keys() & {"role", "from"}


def _in_one_form(*parts: object) -> bool:
    """Returns whether the parts of a record are all texts or all lists of messages."""
    kinds = {type(part) for part in parts}
    return kinds in ({str}, {list})


class Ratings(Preferences):
    """Answers that people found good or bad, each by itself; `model.preference.loss` kto has their
    loss.

    A record has `prompt`, `completion` and `label`, true or false; texts or messages as in
    Preferences. A document is stored as a pair: the answer, and another record's answer to the same
    prompt, by which the loss estimates the model's distance from its reference. Whether the first
    token counts, which is no label, is `label`."""

    ratings = True
    fields = ("prompt", "completion", "label", *BESIDE)

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
        prompt, completion = record.get("prompt"), record.get("completion")
        label = record.get("label")
        reader = self._reader
        if not isinstance(label, bool):
            raise wrong(name, f"needs label, true or false, and has {label!r}")
        if isinstance(completion, list):
            messages = reader.messages(name, prompt or [], "user")
            prompt = reader.with_system(name, record, messages)
            completion = reader.messages(name, completion, "assistant")
        if not prompt or not completion or not _in_one_form(prompt, completion):
            raise wrong(
                name, "needs prompt and completion in one form: texts, or lists of messages"
            )
        answer = {"prompt": prompt, "completion": completion, "label": label}
        return answer | self._beside(name, record, [prompt, completion])

    def _keys_of(self, record: Record) -> tuple[str, ...]:
        return ("prompt", "completion", "label")

    def encode(
        self, spec: TokenizerSpec, tokenizer: Tokenizer, documents: Documents
    ) -> list[Encoded]:
        """Returns tokens of pairs: an answer's partner is the nearest earlier answer of the batch
        that has a different text, as in trl."""
        rated = [json.loads(text) for _, text in documents]
        completions = [answer["completion"] for answer in rated]
        pairs = []
        for number, (name, _) in enumerate(documents):
            answer = rated[number]
            other = _partner_of(number, completions)
            if other is None:
                raise wrong(
                    name, "has the only answer among its neighbours: give other answers too"
                )
            pair = {"prompt": answer["prompt"], "chosen": answer["completion"], "rejected": other}
            if "tools" in answer:
                pair["tools"] = answer["tools"]
            pairs.append((name, json.dumps(pair)))
        encoded = super().encode(spec, tokenizer, pairs)
        for answer, document in zip(rated, encoded, strict=True):
            counted: Any = document.counted
            if len(counted):  # the template has not dropped it
                counted[0] = answer["label"]
        return encoded


def _partner_of(number: int, completions: list[Any]) -> Any:
    """Returns the nearest completion before that of `number` that is of its form, and another; the
    last ones are before the first. None: there is none."""
    completion = completions[number]
    for back in range(1, len(completions)):
        other = completions[number - back]
        if type(other) is type(completion) and other != completion:
            return other
    return None


def _num_equal(first: Sequence[object], second: Sequence[object]) -> int:
    """Returns the length of the common start."""
    number = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        number += 1
    return number
