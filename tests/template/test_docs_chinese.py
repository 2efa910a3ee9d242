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
    titles = [re.sub(r"[^\w -]", "", each.partition("\n")[0]).lower() for each in sections]
    return dict(
        zip([title.replace(" ", "-") for title in titles], sections, strict=True), **{"": first}
    )[anchor]


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and code, whose comments are translated."""
    return [(kind, re.sub(r" *# .*", "", code)) for kind, code in FENCE.findall(text)]


def rows(text: str) -> list[list[str]]:
    found = re.findall(r"^\| ?(.*) \|$", FENCE.sub("", text), re.MULTILINE)
    return [[cell.strip() for cell in row.split(" | ")] for row in found]


def differences(chinese: str, english: str) -> list[str]:
    """What the Chinese part gives and the English one lacks. Commands of a part that has any, and
    the keys of its tables, are compared in both directions."""
    ours, theirs = blocks(chinese), blocks(english)
    found = [code for kind, code in ours if (kind, code) not in theirs]
    bash = [[code for kind, code in each if kind == "bash"] for each in (ours, theirs)]
    keys = [{row[0] for row in rows(each) if row[0][:1] == "`"} for each in (chinese, english)]
    found += [f"{each[0]}, {each[1]}" for each in (bash, keys) if each[0] and each[0] != each[1]]
    for row in rows(chinese):  # a cell without Chinese is the cell of an English row
        pairs = [zip(row, other, strict=True) for other in rows(english) if len(other) == len(row)]
        if not any(all(HAN.search(a) or a == b for a, b in each) for each in pairs):
            found.append(" | ".join(row))
    plain = " ".join(english.split())
    for text in re.findall(r"`([^`\n]+)`", FENCE.sub("", chinese)):
        found += [] if text in plain else [text]
    digits = ENGLISH.sub(lambda word: WORDS[word[0].lower()], plain)
    digits = digits.replace("bits", "bit").replace("-bit", " bit")
    figures = Counter(FIGURE.findall(chinese)) - Counter(FIGURE.findall(digits))
    return found + sorted(figures)


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
