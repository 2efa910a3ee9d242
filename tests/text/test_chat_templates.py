"""Published chat templates x records of public data: each is trained on in full, or refused."""

from pathlib import Path

import pytest

from dist_template.text import Bytes
from tests.support.chats import TEMPLATES
from tests.support.templates import (
    ATTACKS,
    PUBLISHED,
    judged,
    reason,
    source_of,
    table,
    tokenizer_for,
)

PATHS = sorted(TEMPLATES.glob("*.jinja"))


def wrong(cells: list) -> list[str]:
    return [" | ".join(cell) for cell in cells if cell.verdict == "WRONG"]


@pytest.mark.slow
def test_a_template_writes_all_of_a_record_or_it_is_refused() -> None:
    cells = [*table(PATHS, PUBLISHED)]
    assert len(cells) == len(PATHS) * len(PUBLISHED) and not wrong(cells)
    right = sum(cell.verdict == "right" for cell in cells)
    assert len(PATHS) >= 30 and right > len(cells) / 2, "a check that refuses all proves nothing"


@pytest.mark.nightly
def test_an_attackers_records_are_written_or_refused() -> None:
    assert not wrong([*table(PATHS, ATTACKS)])


# What counts, typed by hand from the templates: (template, record) -> runs of tokens.
THOUGHT = "<think>\nAdding them up.\n</think>\n\nFour.<|im_end|>"
MASKS = {
    ("qwen3", "<think> in the content"): [THOUGHT],
    ("qwen3", "loss: false"): ["A pike.<|im_end|>"],
    ("qwen2_5", "OpenAI, a call alone"): [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        "<|im_end|>",
        "It is sunny.<|im_end|>",
    ],
    ("llama3_1", "ShareGPT, function_call"): [
        '{"name": "get_weather", "parameters": {"city": "Rome"}}<|eot_id|>',
        "It is sunny.<|eot_id|>",
    ],
    ("gptoss", "reasoning_content"): [
        "<|channel|>analysis<|message|>Adding them up.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Four.<|return|>"
    ],
    ("gemma", "weight: 0"): ["A pike.<end_of_turn>"],
    ("idefics3", "plain"): [" A kestrel.<end_of_utterance>"],
}


@pytest.mark.parametrize(("template", "record"), MASKS)
def test_what_counts_is_what_was_typed_by_hand(template: str, record: str, tmp_path: Path) -> None:
    text = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer = tokenizer_for(text)
    source, document = source_of(PUBLISHED[record], tmp_path)
    (encoded,) = source.encode(Bytes(), tokenizer, [document])
    runs, previous = list[list[int]](), False
    for token, counts in zip(encoded.ids.tolist(), encoded.counted, strict=True):
        if counts:
            runs += [] if previous else [[]]
            runs[-1].append(token)
        previous = counts
    assert [tokenizer.decode(run) for run in runs] == MASKS[template, record]


def test_the_judge_sees_what_is_lost(tmp_path: Path) -> None:
    """A record that differs from what is expected of it is wrong, not right."""
    tokenizer = tokenizer_for((TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8"))
    source, document = source_of(PUBLISHED["plain"], tmp_path)
    other = PUBLISHED["loss: false"]
    assert judged(other, tokenizer, source, document)[0] == "WRONG"
    assert reason("says what x does not write: the tool f; give") == "a tool is not written"
