"""Encodes conversations by a chat template, and finds the tokens that count.

    training_template   the template: a file, the tokenizer's, or trl's form of it
    encode              for each conversation:
      completeness.fit    the form in which the template writes all that it says   lossless.py
      _encoded            it is rendered and tokenized
      _spans              where the messages that count start and end in the text
      _tokens             the tokens in these spans
      _check_trained      nothing of an answer is outside of them

A message counts from the end of the prompt that a server renders before it to the end of its turn.
What the template writes before an answer, such as an empty reasoning block, is the prompt's. A
template that writes earlier turns differently once others follow cannot be divided so. For the
families that it knows, trl has forms of the published templates that keep earlier turns, or mark
answers by `{% generation %}` tags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import InputError, first_line, require
from .documents import Documents, Encoded
from .lossless import Completeness, Fitted, Lost, check_text, text_in
from .notes import Notes
from .records import wrong
from .turns import COUNTS, KNOWN, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer

Render = Callable[..., str]  # of a list of messages
TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
HELP = (
    "set data.source.train_on to last, or give data.source.template, a .jinja file with {% "
    "generation %} tags around"
    " the assistant's turns"
)
WAYS_OUT = (
    "give another template in data.source.template, drop the key by data.source.ignored, or set"
    " data.source.on_lost to drop, which leaves such records out and counts them"
)
# variables of published templates
NO_REASONING: dict[str, Any] = {"enable_thinking": False, "thinking": False}
OPENED = re.compile(r"<think>\s*$")  # a prompt that demands reasoning
PROBE = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


class Template(NamedTuple):
    """A chat template: its Jinja source, a name for messages, and whether tags mark the assistant's
    turns."""

    text: str
    name: str
    has_tags: bool = False


class Span(NamedTuple):
    """A message that counts: its number from 1, and where it starts and ends in the text."""

    number: int
    start: int
    end: int


def training_template(tokenizer: Tokenizer, file: str | None, train_on: str) -> Template:
    """Returns the template that conversations are encoded by for training: `file`, or the
    tokenizer's; trl's form of it if earlier turns change in it. Raises InputError if there is no
    template."""
    if file:
        text = Path(file).read_text(encoding="utf-8")
        return Template(text, file, bool(TAG.search(text)))
    name = f"the chat template of {tokenizer.name_or_path or 'data.tokenizer'}"
    text = tokenizer.chat_template
    if isinstance(text, dict):  # of templates by name
        text = text["default"]
    if not text:
        raise InputError(f"{name} does not exist: {HELP}")
    own = Template(text, name, bool(TAG.search(text)))
    if own.has_tags or train_on == "all" or _divides(tokenizer, own, train_on):
        return own
    require("trl", f"{name}, in which earlier turns change or have no end,", extra="chat")
    from trl.chat_template_utils import get_training_chat_template  # 6 s

    try:
        form = get_training_chat_template(tokenizer) or text
    except Exception:  # ValueError: trl does not know the family; a template raises any error
        return own
    name += ", in trl's form,"
    divides = _divides(tokenizer, Template(form, name), train_on)
    return Template(form, name, has_tags=not divides)


def _divides(tokenizer: Tokenizer, template: Template, train_on: str) -> bool:
    """Returns whether the answers of a conversation can be found without tags."""
    probe = [("", json.dumps({"messages": PROBE}))]
    try:
        encode(tokenizer, template, train_on, ["assistant"], probe)
    except InputError:
        return False
    return True


def encode(
    tokenizer: Tokenizer,
    template: Template,
    train_on: str,
    roles: list[str],
    documents: Documents,
    notes: Notes | None = None,
    drops: bool = False,
) -> list[Encoded]:
    """Returns the tokens of conversations, which are JSON, and which of them count. Raises
    InputError if the template refuses a conversation, changes its turns, loses something that it
    says, or marks nothing in it. `drops`: a conversation that loses something, or that the template
    refuses, has no tokens instead. `notes` counts them, and keys that the template does not
    read."""
    # A text source that shares the tokenizer sets it; a template's special tokens are such.
    tokenizer.backend_tokenizer.encode_special_tokens = False
    encoded = []
    ends = tuple(tokenizer.get_added_vocab())
    completeness = completeness_of(tokenizer, template.text)
    for name, text in documents:
        conversation = json.loads(text)
        messages, tools = conversation["messages"], conversation.get("tools")
        numbers = []  # of the messages that count
        for number, message in enumerate(messages):
            if message.pop(COUNTS, message["role"] in roles):
                numbers.append(number)
        if train_on == "last":
            numbers = numbers[-1:]
        if notes is not None:
            notes.unread.update(_unread(messages, template))
        try:
            # where all tokens count, all reasoning is trained on
            trained = range(len(messages)) if train_on == "all" else numbers
            fitted = completeness.fit(messages, tools, trained)
            document = _encoded(tokenizer, template, train_on, ends, fitted, numbers)
        except Lost as lost:
            if not drops:
                raise lost_in(name, template, lost) from lost
            document = _dropped(notes, name, lost.kind)
        except Exception as error:  # a template raises errors of Jinja and of Python
            if not drops or isinstance(error, InputError):
                what = f"cannot be rendered by {template.name}: {first_line(error)}"
                raise wrong(name, what) from error
            document = _dropped(notes, name, refusal(error))
        if len(document.ids) and document.counted is not None and not document.counted.any():
            raise InputError(f"{template.name} marks no token of {name}: {HELP}")
        encoded.append(document)
    return encoded


def _dropped(notes: Notes | None, name: str, reason: str) -> Encoded:
    """Returns a document without tokens, which no row has; counts it."""
    if notes is not None:
        notes.drop(name, reason)
    return Encoded(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool))


def refusal(error: Exception) -> str:
    """Returns why a template refuses a conversation, for the counts of `prepare`."""
    return f"refused by the template: {first_line(error)[:80]}"


def lost_in(name: str, template: Template, lost: Lost) -> InputError:
    """Returns the error for a record of which a template loses a piece, with the three ways out."""
    return wrong(name, f"says what {template.name} does not write: {lost}; {WAYS_OUT}")


def completeness_of(tokenizer: Tokenizer, template: str, **options: Any) -> Completeness:
    """Returns the check that a template writes all of a conversation; `options` are its
    variables."""

    def render(messages: list[Message], tools: list[Any] | None) -> str:
        rendered: Any = tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=template, tokenize=False, **options
        )
        return rendered

    return Completeness(render)


def _unread(messages: list[Message], template: Template) -> Iterator[str]:
    """Yields the keys of messages that the template does not name."""
    for message in messages:
        for key in message.keys() - KNOWN:
            is_tools = key == "name" and message["role"] == "tool"  # the call has it too
            if not is_tools and key not in template.text:
                yield f"{key} of a turn"


def _encoded(
    tokenizer: Tokenizer,
    template: Template,
    train_on: str,
    ends: tuple[str, ...],
    fitted: Fitted,
    numbers: list[int],
) -> Encoded:
    """Returns the tokens of a conversation, and which of them count: the messages of `numbers`."""
    messages, pieces = fitted.messages, fitted.pieces
    tools: Any = fitted.tools
    render = partial(tokenizer.apply_chat_template, tools=tools, chat_template=template.text)
    out: Any = render(
        messages,
        return_assistant_tokens_mask=template.has_tags,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    ids = np.array(out["input_ids"], dtype=np.int64)
    offsets = np.array(out["offset_mapping"])
    as_text: Any = partial(render, tokenize=False)
    text = as_text(messages)
    if train_on == "all":
        check_text(pieces, text, range(len(messages)))
        return Encoded(ids, np.ones(len(ids), dtype=bool))
    spans = list(_spans(as_text, text, ends, template, messages, numbers))
    counted = _tokens(spans, offsets)
    if template.has_tags:
        counted &= np.array(out["assistant_masks"], dtype=bool)
    check_text(pieces, text, numbers)
    for span in spans:
        _check_trained(span, text, counted, offsets, fitted)
    return Encoded(ids, counted)


def _check_trained(
    span: Span, text: str, counted: np.ndarray, offsets: np.ndarray, fitted: Fitted
) -> None:
    """Raises Lost if a piece of a message that counts is not among the tokens that count. Tags of a
    template may leave a text out as a whole, but no tool call."""
    starts, ends = offsets.T
    inside = offsets[counted & (span.start <= starts) & (ends <= span.end)]
    number = span.number - 1
    if not len(inside) and not fitted.messages[number].get("tool_calls"):
        return
    trained = ""
    if len(inside):
        trained = text[inside[0, 0] : inside[-1, 1]]
    check_text(fitted.pieces, trained, [number], only=number)


def _spans(
    render: Render,
    text: str,
    ends: tuple[str, ...],
    template: Template,
    messages: list[Message],
    numbers: list[int],
) -> Iterator[Span]:
    """Yields where messages are in the `text` of a conversation; `ends` are tokens that may end a
    turn. With tags, a span is only where their mask is read. Raises InputError if a turn does not
    follow its prompt, changes, or has no end."""
    for number in numbers:
        turn = render(messages[: number + 1]).rstrip()  # no label follows the token that ends it
        is_answer = number > 0 and messages[number]["role"] == "assistant"
        if is_answer:
            prompt = _prompt(render, messages[:number], turn, template)
        else:  # nothing asks for it
            prompt = turn[: turn.rfind(text_in(messages[number]).strip())]
        has_end = turn.endswith(ends) or _goes_on(turn, messages[number])
        if template.has_tags and is_answer:
            end = _start_of_next_answer(render, text, messages, number)
            prompt = prompt or render(messages[:number])
        elif prompt and text.startswith(turn) and has_end:
            end = len(turn)
        else:
            raise InputError(
                f"message {number + 1} does not continue a server's prompt, changes when others"
                f" follow, or has no end: {HELP}"
            )
        yield Span(number + 1, len(prompt), end)


def _start_of_next_answer(render: Render, text: str, messages: list[Message], number: int) -> int:
    """Returns where the mask of an answer is read up to: the text before the next one, or all."""
    for following in range(number + 1, len(messages)):
        if messages[following]["role"] == "assistant":
            return len(render(messages[:following]))
    return len(text)


def _goes_on(turn: str, message: Message) -> bool:
    """Returns whether the template writes something after a message's content."""
    content = text_in(message).strip()
    return bool(content) and content in turn and not turn.endswith(content)


def _prompt(render: Render, messages: list[Message], turn: str, template: Template) -> str:
    """Returns the longest of the prompts for an answer that `turn` continues: with reasoning or
    not; else ""."""
    served = render(messages, add_generation_prompt=True)
    prompts = [served, OPENED.sub("", served)]
    if "thinking" in template.text:
        prompts.append(render(messages, add_generation_prompt=True, **NO_REASONING))
    continued = [prompt for prompt in prompts if turn.startswith(prompt)]
    return max(continued, key=len, default="")


def _tokens(spans: list[Span], offsets: np.ndarray) -> np.ndarray:
    """Returns which tokens are in a span; `offsets` (tokens, 2) are their starts and ends in the
    text. Raises InputError if a token has characters of a prompt and of an answer: a server divides
    them otherwise."""
    starts, ends = offsets.T
    counted = np.zeros(len(offsets), dtype=bool)
    for number, start, end in spans:
        joined = (starts < start) & (start < ends)
        if joined.any():
            raise InputError(
                f"the tokenizer joins the end of a prompt with the start of message {number}"
                f" (token {int(joined.argmax())}): remove the white space there"
            )
        counted |= (start <= starts) & (starts < ends) & (ends <= end)
    return counted


def last_turn(counted: np.ndarray) -> tuple[int, int]:
    """Returns start and end of the last run of counted tokens; (0, 0) if no token counts."""
    positions = np.flatnonzero(counted)
    if not len(positions):
        return 0, 0
    gaps = np.flatnonzero(np.diff(positions) > 1)
    first = gaps[-1] + 1 if len(gaps) else 0  # of the last run
    return int(positions[first]), int(positions[-1]) + 1
