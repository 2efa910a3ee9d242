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
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import first_line
from ..tokenizers import TokenizerSpec
from .chat import Chat, check_roles, messages_of
from .chat_template import training_template
from .documents import Documents, Encoded
from .records import wrong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer

ANSWERS = ("chosen", "rejected")


class Preferences(Chat):
    """Pairs of a chosen and a rejected answer to a prompt; `model.preference` has their loss.

    A record has `prompt`, `chosen` and `rejected`: texts, which are joined as they are, or lists of
    messages, which the chat template renders. `chosen` and `rejected` may be full conversations.
    The arguments are those of Chat, but all tokens of the answers count whatever `train_on` is.
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

    def encode(
        self, spec: TokenizerSpec, tokenizer: Tokenizer, documents: Documents
    ) -> list[Encoded]:
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
