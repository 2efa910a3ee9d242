"""Corpora of conversations, and what counts in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_dev.data import DataModule

from dist_template import InputError
from dist_template.text import Chat, Pretrained
from tests.support import chats
from tests.support.chats import TURNS, messages, write
from tests.support.runs import quiet

GOOD = {"messages": messages(*TURNS)}


def prepared(
    tmp_path: Path, source: Chat, family: str = "qwen3", template: str | None = None
) -> DataModule:
    folder = chats.tokenizer(tmp_path / family, family, template)
    options = {"validation_share": 0.0, "test_share": 0.0, "cache_dir": str(tmp_path / "cache")}
    data = DataModule(source, Pretrained(str(folder)), 256, 1, 1, **options)
    data.prepare(report=quiet)
    return data


def counted_text(data: DataModule) -> list[str]:
    """The runs of tokens that count, decoded."""
    tokens, counted = data.corpus.tokens("train"), data.corpus.counted("train")
    edges = np.flatnonzero(np.diff(np.concatenate(([0], counted, [0]))))
    return [data.text_tokenizer.decode(tokens[a:b]) for a, b in edges.reshape(-1, 2)]


def refused(tmp_path: Path, **options: Any) -> str:
    template = options.pop("tokenizers", None)
    path = write(tmp_path / "a.jsonl", options.pop("records", [GOOD]))
    with pytest.raises(InputError) as caught:
        prepared(tmp_path, Chat([str(path)], **options), template=template)
    assert "\n" not in str(caught.value)
    return str(caught.value)
