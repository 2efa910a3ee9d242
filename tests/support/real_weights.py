"""SmolLM2-135M-Instruct and English dialogues for nightly tests, from packages of the index.

What is made of them stays in build/, which git ignores.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from demonstrations import weights
from tests import ROOT
from tests.support import chats

MADE = ROOT / "build" / weights.NAME
DIALOGUES = "chatterbot-corpus==1.3.3"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A folder with `model`, weights in float32 and a tokenizer, and `dialogues.jsonl`."""
    try:
        weights.make(MADE / "model")
        if not (MADE / "dialogues.jsonl").exists():
            with tempfile.TemporaryDirectory(dir=MADE) as packages:
                weights.install(Path(packages), [DIALOGUES])
                found = dialogues(Path(packages, "chatterbot_corpus"))
                chats.write(MADE / "dialogues.jsonl", found)
    except SystemExit as no_index:
        pytest.skip(f"{no_index}")
    return MADE


def dialogues(package: Path) -> list[dict[str, Any]]:
    """Returns the English dialogues; drops entries that are no lists, and unanswered last turns."""
    found = []
    for path in sorted(package.glob("data/english/*.yml")):
        for texts in yaml.safe_load(path.read_text("utf-8"))["conversations"]:
            if isinstance(texts, list):
                texts = texts[: len(texts) // 2 * 2]
                roles = ["user", "assistant"] * (len(texts) // 2)
                turns = zip(roles, map(str, texts), strict=True)
                found.append({"messages": chats.messages(*turns)})
    return found
