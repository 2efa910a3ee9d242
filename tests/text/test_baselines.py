"""The figures of predictors without a model are those of the labels that training reads."""

import bz2
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainer_dev.data import DataModule

from dist_template.callbacks.record import _data as data_facts
from dist_template.text import Bytes, Chat, Jsonl, Mixture, Preferences, Source
from dist_template.text.batches.rows import NOT_COUNTED
from dist_template.text.cache.baselines import SAMPLE_BYTES, compressed, unigram
from tests.support.chats import TAGGED, write
from tests.support.fault_runs import sentences
from tests.support.runs import quiet


def prepared(source: Source, folder: Path, seq_len: int = 37) -> DataModule:
    cache, shares = str(folder / "cache"), {"validation_share": 0.1, "test_share": 0.0}
    data = DataModule(source, Bytes(), seq_len, 1, 1, cache_dir=cache, **shares)
    data.prepare(report=quiet)
    return data


def labels_of(data: DataModule) -> Tensor:
    """Returns the labels that count of all rows of the train split."""
    rows = data.rows_of("train")
    labels = rows.__getitems__([*range(len(rows))])["labels"].flatten()
    return labels[labels != NOT_COUNTED]


def texts(folder: Path, number: int = 40, name: str = "texts") -> Jsonl:
    records = [{"text": sentences(each)[:90]} for each in range(number)]
    return Jsonl([str(write(folder / f"{name}.jsonl", records))])


def template_in(folder: Path) -> str:
    path = folder / "template.jinja"
    path.write_text(TAGGED.replace("<|im_end|>", "{{ eos_token }}"))
    return str(path)


def chats(folder: Path) -> Chat:
    """Prompts with completions, and conversations of four turns."""
    records: list[Any] = []
    for number in range(40):
        text = sentences(number)[:30]
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes, 1."}]
        records += [{"prompt": f"go {number}: ", "completion": text}, {"messages": turns * 2}]
    return Chat([str(write(folder / "chats.jsonl", records))], template=template_in(folder))


@pytest.mark.parametrize("make", [texts, chats], ids=["plain text", "conversations"])
def test_figures_are_of_the_labels_that_count(make: Any, tmp_path: Path) -> None:
    """Compared with torch's cross-entropy of the best logits that do not depend on the input."""
    data = prepared(make(tmp_path), tmp_path, 512 if make is chats else 37)  # nothing is cut
    labels = labels_of(data)
    counts = torch.bincount(labels, minlength=data.vocab_size).double()
    logits = (counts + 1e-300).log().expand(len(labels), -1)
    facts = data.label_baselines
    # Of plain text, the first of all tokens is no label.
    exact = 1e-5 if make is chats else 1e-3
    expected = torch.nn.functional.cross_entropy(logits, labels).item()
    assert facts["unigram_loss"] == pytest.approx(expected, rel=exact)
    accuracy = (logits.argmax(-1) == labels).double().mean().item()
    assert facts["unigram_accuracy"] == pytest.approx(accuracy, rel=exact)
    share = len(labels) / data.corpus.num_tokens("train")
    assert facts["labels_per_token"] == pytest.approx(share, rel=exact)
    assert data_facts(data).items() >= facts.items(), "facts.json has them"
    assert json.loads(json.dumps(facts)) == facts


def test_a_mixture_is_weighted_by_its_labels(tmp_path: Path) -> None:
    records = [{"text": "ab" * number} for number in range(20, 60)]
    a, b = texts(tmp_path), Jsonl([str(write(tmp_path / "b.jsonl", records))])
    of_both = prepared(Mixture({"a": a, "b": b}, {"a": 1, "b": 3}), tmp_path).label_baselines
    of_a, of_b = (prepared(each, tmp_path).label_baselines for each in (a, b))
    for name in ("unigram_loss", "unigram_accuracy", "compressed_loss"):
        mean = (of_a[name] + 3 * of_b[name]) / 4
        assert of_both[name] == pytest.approx(mean, rel=1e-9), name


def test_a_source_that_is_not_read_does_not_count(tmp_path: Path) -> None:
    a, b = texts(tmp_path, 40), texts(tmp_path, 60, "more")
    mixture = Mixture({"a": a, "b": b}, {"a": 1, "b": 0})
    of_a = prepared(a, tmp_path).label_baselines
    assert prepared(mixture, tmp_path).label_baselines == pytest.approx(of_a)


def test_pairs_and_older_caches_have_no_figures(tmp_path: Path) -> None:
    pairs = [{"prompt": f"q{i} ", "chosen": "good", "rejected": "bad"} for i in range(40)]
    path = write(tmp_path / "pairs.jsonl", pairs)
    data = prepared(Preferences([str(path)], template=template_in(tmp_path)), tmp_path, 128)
    assert data.label_baselines == {} and "unigram_loss" not in data_facts(data)
    data = prepared(texts(tmp_path), tmp_path)
    content = data.corpus.content()
    manifest = data.corpus.folder / "manifest.json"
    known = json.loads(manifest.read_text())
    del known["baselines"]
    manifest.write_text(json.dumps(known))
    assert data.require().content() == content, "a run from before goes on"
    assert data.label_baselines == {} and "unigram_loss" not in data_facts(data)


def test_a_data_module_without_figures_has_no_facts() -> None:
    class Own:
        label_baselines = 3

    assert "unigram_loss" not in data_facts(Own())


def test_no_label_has_no_loss() -> None:
    assert unigram(np.zeros(5, dtype=np.int64)) == {"labels": 0}
    assert unigram(np.array([4, 4])) == {
        "labels": 8,
        "unigram_loss": pytest.approx(math.log(2), abs=1e-6),
        "unigram_accuracy": 0.5,
    }
    nothing = np.zeros(10, dtype=np.uint16)
    assert compressed(nothing, np.zeros(10, dtype=bool)) == 0


def test_repeated_texts_are_known_by_their_compression() -> None:
    draw = np.random.default_rng(0)
    noise = draw.integers(0, 256, 400_000).astype(np.uint16)
    assert compressed(noise) == pytest.approx(math.log(256), rel=0.05)
    assert compressed(np.tile(noise[:50], 8000)) < 0.01
    few = noise[:100]
    of_few = len(bz2.compress(few.tobytes())) - len(bz2.compress(b""))
    assert compressed(few) == pytest.approx(of_few * 8 * math.log(2) / 100, abs=1e-6)
    # Answers, which count, repeat what is before them; and a long split is a sample of all parts.
    prompts = draw.integers(0, 256, (4000, 1)).astype(np.uint16).repeat(4, axis=1)
    counted = np.tile([False, True, True, True], 4000)
    assert compressed(prompts.ravel(), counted) < 0.2 * math.log(256)
    half = np.concatenate([np.zeros_like(noise), noise])
    assert 2 * half.nbytes > SAMPLE_BYTES
    assert compressed(half) == pytest.approx(0.5 * math.log(256), rel=0.1)
