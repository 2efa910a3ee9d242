"""Mixtures: each source gives its share, in an order without regard to ranks and interruptions."""

import json
from collections import Counter
from itertools import count, islice
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_dev.data import DataModule

from dist_template.text import Bytes, Jsonl, Mixture, Source
from dist_template.text.sources import mixture
from tests.support.library import NOT_COUNTED, global_order
from tests.support.parity import PauseAfter
from tests.support.runs import Workers, logged, newest, only_run, quiet, run, small
from tests.support.strategies import flags_of

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
NAMES = ("a", "b", "c")
WEIGHTS = st.fixed_dictionaries({name: st.sampled_from([0.0, 0.1, 1.0, 3.0]) for name in NAMES})
CHANGES = st.lists(
    st.tuples(st.integers(1, 3000), WEIGHTS.filter(lambda weights: any(weights.values()))),
    min_size=1, max_size=3, unique_by=lambda change: change[0],
).map(lambda changes: [(0, changes[0][1]), *sorted(changes[1:])])  # fmt: skip
SIZES = st.fixed_dictionaries({name: st.integers(1, 400) for name in NAMES})


@pytest.mark.slow
@PROPERTY
@given(SIZES, CHANGES, st.integers(0, 3))
def test_each_source_gives_its_share_and_all_its_rows(sizes: Any, changes: Any, seed: int) -> None:
    order, length = mixture.MixtureOrder(sizes, changes, seed), 4 * mixture.BLOCK
    rows = [order(position) for position in range(length)]
    for name in NAMES:
        own = [row for row in rows if global_order.source_of(sizes, row) == name]
        shares = 0.0
        for position in range(length):
            weights = next(each for start, each in reversed(changes) if start <= position)
            shares += weights[name] / sum(weights.values())
        assert abs(len(own) - shares) <= 2.51, "rounded, at a block's end that rounding moves"
        seeds = (sizes[name], seed, crc32(name.encode()))
        epochs = (global_order.shuffled(*seeds, epoch) for epoch in count())
        stream = (order._starts[name] + row for epoch in epochs for row in epoch.tolist())
        assert own == [*islice(stream, len(own))], "all of its rows in each epoch, in random order"


@PROPERTY
@given(SIZES, CHANGES, CHANGES, st.integers(0, 2000))
def test_new_weights_lose_no_sample(sizes: Any, before: Any, after: Any, position: int) -> None:
    """They take effect at the next block: until then the order is the old one."""
    old, new = mixture.MixtureOrder(sizes, before, 0), mixture.MixtureOrder(sizes, after, 0)
    new.resume([*map(list, before)], position)
    assert [new(at) for at in range(position)] == [old(at) for at in range(position)]
    length = position + 2 * mixture.BLOCK + 10
    end = new._number(length)
    for name in NAMES:
        read = Counter(new(at) for at in range(new._start(end)))
        own = [read[row] for row in range(new._starts[name], new._starts[name] + sizes[name])]
        assert max(own) - min(own) <= 1, "each epoch has each row once"
    again = mixture.MixtureOrder(sizes, after, 0)
    again.resume(new.changes, length)
    assert again.changes == new.changes or before != after


def texts(folder: Path) -> dict[str, Source]:
    """200 documents of capitals, 60 of digits."""
    rng = np.random.default_rng(0)
    for name, alphabet, num in (("words", "ABCDEF", 200), ("digits", "0123", 60)):
        lines = [json.dumps({"text": "".join(rng.choice([*alphabet], 90))}) for _ in range(num)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return {name: Jsonl([str(folder / f"{name}.jsonl")]) for name in ("words", "digits")}


def module_of(folder: Path, weights: dict[str, float]) -> DataModule:
    source = Mixture(texts(folder), weights)
    cache = str(folder / "cache")
    return DataModule(source, Bytes(), 16, 8, 4, cache_dir=cache, validation_share=0.1)


def test_rows_are_of_one_source_and_weights_are_not_part_of_the_cache(tmp_path: Path) -> None:
    data = module_of(tmp_path, {"words": 1, "digits": 3})
    corpus = data.prepare(report=quiet)
    rows = data.rows_of("train")
    tokens = sum(counts["tokens"] for counts in corpus.parts("train").values())
    assert tokens == corpus.num_tokens("train") and len(rows) == sum(rows.sizes.values())
    counted = 0
    for row in range(len(rows)):
        batch = rows.__getitems__([row])
        text = data.text_tokenizer.decode(batch["input_ids"][0].tolist(), skip_special_tokens=True)
        assert text.isalpha() == (global_order.source_of(rows.sizes, row) == "words")
        assert text.isdigit() != text.isalpha()
        counted += int((batch["labels"] != NOT_COUNTED).sum())
    assert counted == tokens - 2, "each token is a label once, but for the first of each source"
    other = module_of(tmp_path, {"words": 1, "digits": 0})
    assert other.require().folder == corpus.folder
    assert "words" in corpus.describe() and "digits" in corpus.describe()


@pytest.mark.slow
def test_a_mixture_trains_on_any_number_of_ranks_and_is_evaluated_by_source(tmp_path: Path) -> None:
    paths = {name: [str(tmp_path / f"{name}.jsonl")] for name in texts(tmp_path)}
    source = {n: {"class_path": "Jsonl", "init_args": {"paths": p}} for n, p in paths.items()}
    weights = {"sources": source, "weights": {"words": 1, "digits": 1}}
    flags = [
        "fit", *small(tmp_path, tmp_path / "cache", tmp_path), "--data.seq_len=16",
        f"--data.source={json.dumps({'class_path': 'Mixture', 'init_args': weights})}",
        "--data.validation_share=0.1", "--data.test_share=0", "--model.optim.warmup=1",
        "--trainer.max_steps=6", "--trainer.val_check_interval=6", "--trainer.logger=false",
    ]  # fmt: skip
    assert run(*flags, "--data.micro_batch_size=4") == 0
    folder = only_run(tmp_path)
    for name in paths:
        epochs = list(logged(folder, f"data/{name}/epochs").values())
        assert epochs == sorted({*epochs})
    two, pause = [*flags, *flags_of("fsdp2"), "--trainer.devices=2"], [PauseAfter(4)]
    record = Workers(2).run(two, tmp_path / "two").check()
    cut = [*two, "--run.name=cut"]
    first = Workers(2).run(cut, tmp_path / "cut", callbacks=pause).check()
    assert record.loss == pytest.approx(logged(folder, "train/loss"), rel=1e-5)
    one = ["--data.micro_batch_size=8", f"--ckpt_path={newest(first.run)}", "--run.name=rest"]
    assert run(*flags, *one) == 0
    rest = logged(only_run(tmp_path, "rest"), "train/loss")
    assert [rest[5], rest[6]] == pytest.approx([record.loss[5], record.loss[6]], rel=1e-5)
    metrics = record.eval()[6]
    assert metrics["eval/words/loss"] != pytest.approx(metrics["eval/digits/loss"], rel=1e-4)
    for name in ("eval/words/loss", "eval/digits/loss", "eval/digits/token_accuracy"):
        assert metrics[name] == pytest.approx(logged(folder, name)[6], rel=1e-5)
