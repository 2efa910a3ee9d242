"""README.zh.md follows the English pages: a comment before each part names its page and heading."""

import re
from collections import Counter

import pytest

from .conftest import ROOT

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HAN = re.compile(r"[\u4e00-\u9fff]")
# With its unit; digits of names (FSDP2, ZeRO-3, Qwen3-0.6B) are no figures.
FIGURE = re.compile(
    r"(?<![A-Za-z0-9_./-])\d+(?:[.,:-]\d+)*(?:e-\d+)?(?: ?(?:%|[GM]B|s|bit)(?![a-z]))?"
)
WORDS = {"two": "2", "three": "3", "four": "4", "six": "6", "ten": "10", "sixty-four": "64"}
ENGLISH = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)  # such a word is a digit there
PARTS = re.split(r"<!-- (\S+\.md\S*) -->", (ROOT / "README.zh.md").read_text(encoding="utf-8"))[1:]
CHINESE = dict(zip(PARTS[::2], PARTS[1::2], strict=True))


def english(part: str) -> str:
    """The section with that id, or the text above a page's first section."""
    page, _, anchor = part.partition("#")
    first, *sections = (ROOT / page).read_text(encoding="utf-8").split("\n## ")
    if not anchor:
        return first
    for section in sections:
        title = section.partition("\n")[0]
        if re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") == anchor:
            return section
    raise KeyError(part)


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and code, whose comments are translated."""
    return [(kind, re.sub(r" *# .*", "", code)) for kind, code in FENCE.findall(text)]


def rows(text: str) -> list[list[str]]:
    lines = re.findall(r"^\| ?(.*) \|$", FENCE.sub("", text), re.MULTILINE)
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


def commands(text: str) -> list[str]:
    return [code for kind, code in blocks(text) if kind == "bash"]


def keys(text: str) -> set[str]:
    """The keys that the tables of a part have in their first column."""
    return {row[0] for row in rows(text) if row[0].startswith("`")}


def is_translated(row: list[str], other: list[str]) -> bool:
    """Whether the cells without Chinese are those of an English row."""
    if len(row) != len(other):
        return False
    return all(HAN.search(cell) or cell == there for cell, there in zip(row, other, strict=True))


def in_digits(english: str) -> str:
    digits = ENGLISH.sub(lambda word: WORDS[word[0].lower()], english)
    return digits.replace("bits", "bit").replace("-bit", " bit")


def differences(chinese: str, english: str) -> list[str]:
    """What the Chinese part gives and the English one lacks. Commands of a part that has any, and
    the keys of its tables, are compared in both directions."""
    lacking = [code for kind, code in blocks(chinese) if (kind, code) not in blocks(english)]
    for read in (commands, keys):
        ours, theirs = read(chinese), read(english)
        if ours and ours != theirs:
            lacking.append(f"{ours}, {theirs}")
    for row in rows(chinese):
        if not any(is_translated(row, other) for other in rows(english)):
            lacking.append(" | ".join(row))
    plain = " ".join(english.split())
    for text in re.findall(r"`([^`\n]+)`", FENCE.sub("", chinese)):
        if text not in plain:
            lacking.append(text)
    figures = Counter(FIGURE.findall(chinese)) - Counter(FIGURE.findall(in_digits(plain)))
    return lacking + sorted(figures)


@pytest.mark.parametrize("part", CHINESE)
def test_commands_tables_and_figures_are_the_english_ones(part: str) -> None:
    assert differences(CHINESE[part], english(part)) == []


EDITS = {  # in an English part: the words before and after
    "a command": ("README.md", "make test ", "make tests "),
    "a figure": ("README.md", "2,194 of", "2,193 of"),
    "a figure in words": ("README.md", "sixty-four", "ninety"),
    "a default": ("docs/finetune.md#adapters", "| 8, 16 |", "| 8, 32 |"),
    "a key more": ("docs/finetune.md#adapters", "| `rslora`", "| `new` | 0 | |\n| `rslora`"),
    "a name": ("docs/finetune.md#preferences", "reward_margin", "margins"),
    "a record": ("docs/finetune.md#conversations", '"gpt"', '"bot"'),
    "a command more": ("docs/launch.md", "\n```\n", "\npython -m my_trainer plan\n```\n"),
    "an exit code": ("docs/recovery/killed.md#exit-codes", "| 71 |", "| 72 |"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_the_english_page_alone_is_found(edit: str) -> None:
    part, before, after = EDITS[edit]
    text = english(part)
    assert before in text and differences(CHINESE[part], text.replace(before, after, 1))
