"""Preferences: a source of pairs, of which a model learns the better answer.

    data:
      source:
        class_path: Preferences
        init_args: {paths: [pairs/*.jsonl]}

A document of it is one pair as JSON: `prompt`, `chosen` and `rejected`, all texts or all lists of
messages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import first_line
from ..tokenizers import TokenizerSpec
from .chat import Chat, check_roles, message_of
from .chat_template import Template, training_template
from .documents import Encoded
from .records import wrong

ANSWERS = ("chosen", "rejected")


class Preferences(Chat):
    """Pairs of a chosen and a rejected answer to a prompt; `model.preference` has their loss.

    A record has `prompt`, `chosen` and `rejected`: texts, which are joined as they are, or lists of
    messages, which the chat template renders. `chosen` and `rejected` may be full conversations.
    The arguments are those of Chat, but all tokens of the answers count whatever `train_on` is.
    """

    pairs = True
    shapes = {key: f"{' and '.join(ANSWERS)} as {key}" for key in ("texts", "lists of messages")}
    fields = ("prompt", *ANSWERS)

    def shape_of(self, name: str, record: Any) -> str:
        fields = record if isinstance(record, dict) else {}
        if missing := [key for key in ANSWERS if not fields.get(key)]:
            raise wrong(name, f"has no {missing[0]}: give prompt, chosen and rejected")
        texts, lists = self.shapes
        kinds = [texts if isinstance(fields[key], str) else lists for key in ANSWERS]
        if len({*kinds}) > 1:
            raise wrong(name, "has a text and a list of messages: give both answers in one form")
        return kinds[0]

    def document_of(self, name: str, record: dict[str, Any], shape: str) -> dict[str, Any]:
        pair = {key: record.get(key) for key in self.fields}
        is_text = isinstance(pair["chosen"], str)
        if pair["chosen"] == pair["rejected"]:
            raise wrong(name, "has equal answers, which teach nothing: remove it")
        pair = pair if is_text else _messages(name, pair)
        if not pair["prompt"] or isinstance(pair["prompt"], str) != is_text:
            raise wrong(name, "has no prompt in the form of its answers: give one")
        return pair

    def prepare_tokenizer(self, tokenizer: Any) -> Any:
        if self.template and not tokenizer.chat_template:
            tokenizer.chat_template = training_template(tokenizer, self.template, "all").text
        return tokenizer

    def encode_prompt(self, tokenizer: Any, prompt: str) -> list[int]:
        chat = tokenizer.chat_template
        return super().encode_prompt(tokenizer, prompt) if chat else tokenizer.encode(prompt)

    def encode(
        self, spec: TokenizerSpec, tokenizer: Any, documents: list[tuple[str, str]]
    ) -> list[Encoded]:
        """Returns the tokens of both sequences of each pair, and which are an answer's."""
        # a text source that shares the tokenizer sets it
        tokenizer.backend_tokenizer.encode_special_tokens = False
        pairs = [(name, json.loads(text)) for name, text in documents]
        is_text = isinstance(pairs[0][1]["prompt"], str)
        template = None if is_text else training_template(tokenizer, self.template, "all")
        texts = [text for name, pair in pairs for text in _texts(tokenizer, template, name, pair)]
        ids = iter(tokenizer(texts, add_special_tokens=is_text)["input_ids"])
        return [_joined(name, next(ids), next(ids), next(ids)) for name, _ in pairs]


def _messages(name: str, pair: dict[str, Any]) -> dict[str, Any]:
    """Returns the messages that both conversations start with, and the rest of each."""
    prompt = pair["prompt"] or []
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    chosen, rejected = ([message_of(name, turn) for turn in pair[key]] for key in ANSWERS)
    if chosen[0]["role"] == "assistant":  # else they are full conversations
        prompt = [message_of(name, turn) for turn in prompt]
        chosen, rejected = prompt + chosen, prompt + rejected
    num = _alike(chosen, rejected)
    for full in (chosen, rejected):
        check_roles(name, full)
        if len(full) == num or full[num]["role"] != "assistant":
            raise wrong(name, "has answers that do not start with an assistant's turn: edit them")
    return {"prompt": chosen[:num], "chosen": chosen[num:], "rejected": rejected[num:]}


def _alike(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Returns the length of the common start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _texts(tokenizer: Any, template: Template | None, name: str, pair: Any) -> list[str]:
    """Returns the prompt, and the prompt with each answer; EOS ends an answer that is a text."""
    prompt, end = pair["prompt"], tokenizer.eos_token
    if template is None:
        return [prompt, *(prompt + pair[key].removesuffix(end) + end for key in ANSWERS)]
    given = [prompt, *(prompt + pair[key] for key in ANSWERS)]
    options = {"chat_template": template.text, "tokenize": False}
    try:
        return [
            tokenizer.apply_chat_template(turns, add_generation_prompt=turns is prompt, **options)
            for turns in given
        ]
    except Exception as error:  # a template raises errors of Jinja and of Python
        raise wrong(name, f"is refused by {template.name}: {first_line(error)}") from error


def _joined(name: str, prompt: list[int], chosen: list[int], rejected: list[int]) -> Encoded:
    """Returns both sequences; the answers start where one of them differs from the prompt alone.

    That may be before the prompt's end (as in trl): a tokenizer may join its last characters with
    an answer's first. The first token of a sequence is no label.
    """
    start = max(1, min(_alike(prompt, chosen), _alike(prompt, rejected)))
    if min(len(chosen), len(rejected)) <= start or chosen == rejected:
        raise wrong(name, "has an answer without a token of its own: edit it")
    counted = [np.arange(len(ids)) >= start for ids in (chosen, rejected)]
    return Encoded(np.array(chosen + rejected), np.concatenate(counted))
