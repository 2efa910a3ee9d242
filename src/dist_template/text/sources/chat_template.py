"""Encodes conversations by a chat template that marks what the assistant says.

transformers reads the marks from `{% generation %}` tags. Most published templates have none, and their mask is
silently empty (5.23). trl has templates with tags for the families that it knows; docs/finetune.md has what they render
differently. For others, a turn is what follows the prompt that a server would have rendered before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import InputError, first_line, require
from .documents import Documents, Encoded
from .records import wrong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer

Render = Callable[..., Any]  # apply_chat_template: tokens and their masks, or a text
TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
HELP = "give data.source.template, a .jinja file with {% generation %} around the assistant's turns"


class Template(NamedTuple):
    """A chat template: its Jinja source, a name for messages, and whether tags mark what counts."""

    text: str
    name: str
    has_tags: bool = True


def training_template(tokenizer: Tokenizer, file: str | None, train_on: str) -> Template:
    """Returns the template that conversations are encoded by for training. Raises InputError if there is no template,
    or the file has no tags, which `train_on` needs."""
    needs_tags = train_on != "all"
    if file:
        text = Path(file).read_text(encoding="utf-8")
        if needs_tags and not TAG.search(text):
            raise InputError(
                f"data.source.template {file!r} has no {{% generation %}} tags: put"
                " {% generation %} … {% endgeneration %} around the assistant's turns, or set"
                " data.source.train_on to all"
            )
        return Template(text, file)
    name = f"the chat template of {tokenizer.name_or_path or 'data.tokenizer'}"
    text = tokenizer.chat_template
    text = text["default"] if isinstance(text, dict) else text
    if not text:
        raise InputError(f"{name} does not exist: {HELP}")
    if not needs_tags or TAG.search(text):
        return Template(text, name)
    require("trl", f"{name}, which has no {{% generation %}} tags,")
    from trl.chat_template_utils import get_training_chat_template  # 6 s

    try:
        tagged = get_training_chat_template(tokenizer)
    except ValueError:  # trl does not know the family
        return Template(text, name, has_tags=False)
    return Template(tagged or text, f"{name}, in trl's form,")


def encode(tokenizer: Tokenizer, template: Template, train_on: str, documents: Documents) -> list[Encoded]:
    """Returns the tokens of conversations, which are JSON, and which of them count. Raises InputError if the template
    refuses a conversation, or marks nothing in it."""
    # A text source that shares the tokenizer sets it; a template's special tokens are such.
    tokenizer.backend_tokenizer.encode_special_tokens = False
    tags = template.has_tags and train_on != "all"
    encoded = []
    for name, text in documents:
        conversation = json.loads(text)
        messages, tools = conversation["messages"], conversation.get("tools")
        render = partial(tokenizer.apply_chat_template, tools=tools, chat_template=template.text)
        try:
            offsets = {"return_offsets_mapping": not template.has_tags}
            out: Any = render(messages, return_assistant_tokens_mask=tags, tokenizer_kwargs=offsets)
            counted = np.ones(len(out["input_ids"]), dtype=bool)
            if tags:
                counted = np.array(out["assistant_masks"], dtype=bool)
            elif train_on != "all":
                as_text: Render = partial(render, tokenize=False)
                counted = _in_answers(as_text, messages, np.array(out["offset_mapping"]))
        except Exception as error:  # a template raises errors of Jinja and of Python
            what = f"cannot be rendered by {template.name}: {first_line(error)}"
            raise wrong(name, what) from error
        if train_on == "last":
            counted[: last_turn(counted)[0]] = False
        if not counted.any():
            raise InputError(f"{template.name} marks no token of {name} as the assistant's: {HELP}")
        encoded.append(Encoded(np.array(out["input_ids"], dtype=np.int64), counted))
    return encoded


def _in_answers(render: Render, messages: list[dict[str, str]], offsets: np.ndarray) -> np.ndarray:
    """Returns which tokens of a conversation are in the assistant's turns, by a template without
    tags: from the end of the prompt that a server renders before a turn, to the turn's end.
    `offsets` (tokens, 2) are the tokens' starts and ends in the text that `render` returns.

    Raises InputError if a turn does not follow its prompt, changes when others follow, or has no end."""
    text = render(messages)
    starts, ends = offsets.T
    counted = np.zeros(len(offsets), dtype=bool)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:number], add_generation_prompt=True)
        turn = render(messages[: number + 1])
        answer, said = turn[len(prompt) :], message["content"].strip()
        end = answer.rpartition(said)[2] if said else answer
        is_asked = turn.startswith(prompt) and text.startswith(turn) and said in answer
        if not (is_asked and end.strip()):
            raise InputError(f"message {number + 1} does not continue a server's prompt, or has no end: {HELP}")
        counted |= (len(prompt) <= starts) & (starts < ends) & (ends <= len(turn))
    return counted


def last_turn(counted: np.ndarray) -> tuple[int, int]:
    """Returns start and end of the last run of counted tokens; (0, 0) if no token counts."""
    found = np.flatnonzero(counted)
    if not len(found):
        return 0, 0
    gaps = np.flatnonzero(np.diff(found) > 1)
    return int(found[gaps[-1] + 1] if len(gaps) else found[0]), int(found[-1]) + 1
