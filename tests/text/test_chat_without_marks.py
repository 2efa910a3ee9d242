"""Which tokens of a conversation count under a chat template that does not mark the assistant's turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_template.text import Chat
from tests.support import chats
from tests.support.chat_corpus import GOOD, counted_text, prepared, refused
from tests.support.chats import TURNS, messages, write


@pytest.mark.parametrize(
    ("family", "end"),
    [("llama3_1", "<|eot_id|>"), ("gemma4_v5", "<turn|>\n"), ("lfm2_2_5", "<|im_end|>\n")],
)
def test_answers_of_families_without_marks_follow_a_servers_prompt(
    family: str, end: str, tmp_path: Path
) -> None:
    path, text = write(tmp_path / "a.jsonl", [GOOD]), chats.published(family)
    assert counted_text(prepared(tmp_path, Chat([str(path)]), template=text)) == [
        f"Uno.{end}",
        f"Due, ok.{end}",
    ]


@pytest.mark.parametrize("family", ["gemma3", "llama3", "lfm2", "qwen3_instruct_2507"])
def test_without_marks_the_same_tokens_count(family: str, tmp_path: Path) -> None:
    path, text = (
        write(tmp_path / "a.jsonl", [GOOD, {"messages": messages(*TURNS[1:3], ("user", "ß?"), (
            "assistant", "日 ß"))}]),
        chats.published(family),
    )  # fmt: skip
    marked = counted_text(prepared(tmp_path / "marked", Chat([str(path)]), template=text))
    unknown = text + "{# a family that trl does not know #}"
    assert counted_text(prepared(tmp_path, Chat([str(path)]), template=unknown)) == marked != []


@pytest.mark.parametrize(
    ("was", "becomes", "what"),
    [
        ("{{ m.content }}<|im_end|>{% else %}", "{{ m.content }}{% else %}", "an answer without an end"),
        ("{% if add_generation_prompt %}<|im_start|>", "{% if add_generation_prompt %}<start>", "another prompt"),
        ("{{ m.content }}<|im_end|>{% else %}", "{{ m.content[1:] }}<|im_end|>{% else %}", "another content"),
        ("<|im_end|>{% else %}", "{% if loop.last %}<last>{% endif %}<|im_end|>{% else %}", "another last turn"),
    ],
)  # fmt: skip
def test_answers_that_cannot_be_told_from_a_prompt_are_refused(
    was: str, becomes: str, what: str, tmp_path: Path
) -> None:
    assert was in chats.UNTAGGED, what
    said = refused(tmp_path, tokenizers=chats.UNTAGGED.replace(was, becomes))
    assert (
        "a.jsonl:1" in said
        and "message 3 does not continue a server's prompt, or has no end" in said
    )
    assert "give data.source.template" in said
