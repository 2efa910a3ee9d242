"""What `prepare` reports about data: planted duplicates, lengths and contamination are found, in bounded time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_dev.data import DataModule

from dist_template.text import Bytes, Chat, Jsonl, Pretrained
from dist_template.text.cache.quality import measure, quality_of, similar
from tests.support import chats
from tests.support.chats import TURNS, messages
from tests.support.library import Corpus, quality

WORDS = np.array([f"word{number}" for number in range(2000)])


def some_text(seed: int, words: int = 100) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


def prepared(folder: Path, texts: list[str], validation_share: float = 0.0) -> tuple[Corpus, list[str]]:
    """The cache, and what `prepare` printed."""
    path, printed = folder / "texts.jsonl", []
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    data = DataModule(
        Jsonl([str(path)]), Bytes(), 16, 2, 2, validation_share=validation_share, test_share=0.0,
        cache_dir=str(folder / "cache"),
    )  # fmt: skip
    return data.prepare(report=printed.append), printed


def test_planted_duplicates_are_counted(tmp_path: Path) -> None:
    """Of 100 documents, 10 are copies and 20 others are copies with a changed word; each has another length."""
    texts = [some_text(seed, 100 + seed) for seed in range(70)]
    changed = [text.replace(text.split()[50], "changed", 1) for text in texts[:20]]
    corpus, printed = prepared(tmp_path, texts + texts[:10] + changed)
    found: Any = measure(corpus)
    assert found["documents"] == 100 and found["examined_share"] == 1.0
    assert found["duplicate_share"] == pytest.approx(0.1)
    assert found["near_duplicate_share"] == pytest.approx(0.2, abs=0.02)
    assert found["longest_tokens"] == max(len(text) + 1 for text in texts)
    assert found["masked_share"] is found["contaminated_share"] is None
    assert "near duplicate share  20.0%" in printed[-1] and "masked" not in printed[-1]


def test_text_of_train_in_validation_is_counted(tmp_path: Path) -> None:
    """Of 200 documents that share a passage, some are held out."""
    passage = some_text(0, 200)
    texts = [f"{passage} {some_text(seed, 200)}" for seed in range(1, 200)]
    found: Any = measure(prepared(tmp_path, texts, validation_share=0.1)[0])
    assert found["contaminated_share"] == pytest.approx(0.5, abs=0.1)


def test_no_more_is_read_than_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, _ = prepared(tmp_path, [some_text(seed) for seed in range(300)])
    monkeypatch.setattr(quality, "TOKENS", corpus.num_tokens("train") // 4)
    found: Any = measure(corpus)
    assert 0.1 < found["examined_share"] < 0.25 and 30 < found["documents"] < 75
    monkeypatch.setattr(quality, "DOCUMENTS", 32)
    fewer: Any = measure(corpus)
    assert 16 <= fewer["documents"] <= 32


def test_a_document_shorter_than_a_window_is_similar_to_none() -> None:
    assert similar([np.arange(5)] * 2) == 0
    assert similar([np.arange(50)] * 2) == 1


def test_the_figures_are_stored_and_a_read_only_cache_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, _ = prepared(tmp_path, [some_text(seed) for seed in range(20)])
    monkeypatch.setattr(quality, "measure", lambda corpus: {"documents": 7})
    assert quality_of(corpus)["documents"] == 20, "as prepare stored it"
    (corpus.folder / quality.FILE).unlink()

    def refused(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(quality, "write_atomically", refused)
    assert quality_of(corpus) == {"documents": 7}


def test_the_masked_share_of_conversations_is_that_of_their_labels(tmp_path: Path) -> None:
    records = [{"messages": messages(*TURNS[1:3])}] * 3 + [{"messages": messages(*TURNS)}]
    path, folder = chats.write(tmp_path / "chats.jsonl", records), chats.tokenizer(tmp_path / "tokenizer")
    data = DataModule(
        Chat([str(path)]), Pretrained(str(folder)), 256, 1, 1, validation_share=0.0, test_share=0.0,
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    found: Any = measure(data.prepare(report=lambda _: None))
    assert found["documents"] == 4 and found["duplicate_share"] == 0.5
    assert found["longest_tokens"] == np.diff(data.corpus.starts("train")).max()
    assert found["masked_share"] == pytest.approx(1 - data.corpus.counted("train").mean())
    assert 0.5 < found["masked_share"] < 1
