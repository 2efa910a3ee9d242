"""Mixtures: each source gives its share, in an order that depends on neither ranks nor interruptions."""

from __future__ import annotations

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

from dist_template import InputError
from dist_template.text import Bytes, Chat, Jsonl, Mixture, Pretrained, Source, TextFiles
from dist_template.text.sources import mixture
from tests.support import chats
from tests.support.chats import TURNS, messages
from tests.support.library import NOT_COUNTED, global_order
from tests.support.parity import PauseAfter
from tests.support.runs import SMALL_LLAMA, Workers, logged, newest, only_run, quiet, run

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
NAMES = ("a", "b", "c")
WEIGHTS = st.fixed_dictionaries({name: st.sampled_from([0.0, 0.1, 1.0, 3.0]) for name in NAMES})
CHANGES = st.lists(
    st.tuples(st.integers(1, 3000), WEIGHTS.filter(lambda weights: any(weights.values()))), min_size=1, max_size=3,
    unique_by=lambda change: change[0],
).map(lambda changes: [(0, changes[0][1]), *sorted(changes[1:])])  # fmt: skip
SIZES = st.fixed_dictionaries({name: st.integers(1, 400) for name in NAMES})


@PROPERTY
@given(SIZES, CHANGES, st.integers(0, 3))
def test_each_source_gives_its_share_and_all_its_rows_in_each_epoch(sizes: Any, changes: Any, seed: int) -> None:
    order, length = mixture.MixtureOrder(sizes, changes, seed), 4 * mixture.BLOCK
    rows = [order(position) for position in range(length)]
    for name in NAMES:
        own = [row for row in rows if global_order.source_of(sizes, row) == name]
        shares = [
            next(weights[name] / sum(weights.values()) for start, weights in reversed(changes) if start <= position)
            for position in range(length)
        ]
        assert abs(len(own) - sum(shares)) <= 2.51, "rounded, at a block's end that is moved by the sources' rounding"
        epochs = (global_order.shuffled(sizes[name], seed, crc32(name.encode()), epoch) for epoch in count())
        stream = (order._starts[name] + row for epoch in epochs for row in epoch.tolist())
        assert own == [*islice(stream, len(own))], "its own rows, all of them in each epoch, in random order"


@PROPERTY
@given(SIZES, CHANGES, st.lists(st.integers(0, 5000), min_size=1, max_size=20))
def test_a_position_has_one_row_whatever_was_read_before(sizes: Any, changes: Any, positions: list[int]) -> None:
    order = mixture.MixtureOrder(sizes, changes, 0)
    read = [order(position) for position in positions]
    assert read == [mixture.MixtureOrder(sizes, changes, 0)(position) for position in positions]
    assert read != [mixture.MixtureOrder(sizes, changes, 1)(position) for position in positions] or len({*read}) < 5


@PROPERTY
@given(SIZES, CHANGES, st.integers(1, 4), st.integers(1, 4), st.integers(0, 900))
def test_ranks_read_the_stream_together(sizes: Any, changes: Any, ranks: int, micro: int, start: int) -> None:
    stream, size, num = mixture.MixtureOrder(sizes, changes, 0), ranks * micro, sum(sizes.values())
    orders = [
        global_order.GlobalOrder(num, size, micro, rank, ranks, consumed=lambda: start, stream=stream)
        for rank in range(ranks)
    ]
    read = [row for batches in islice(zip(*orders, strict=True), 40) for batch in batches for row in batch]
    expected = mixture.MixtureOrder(sizes, changes, 0)
    assert read == [expected(start + at) for at in range(len(read))]


@PROPERTY
@given(SIZES, CHANGES, CHANGES, st.integers(0, 2000))
def test_new_weights_lose_and_repeat_no_sample(sizes: Any, before: Any, after: Any, position: int) -> None:
    """They take effect at the next block: until then the order is the old one, and then each source continues."""
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


def test_evaluation_reads_each_row_once_in_batches_of_one_source() -> None:
    sizes = {"a": 7, "b": 1, "c": 20}
    ranks = [global_order.eval_batches(sizes, 3, rank, 2) for rank in range(2)]
    read: list[int] = []
    for pair in zip(*ranks, strict=True):
        assert len({global_order.source_of(sizes, row) for batch in pair for row in batch}) == 1, (
            "on all ranks at the same time"
        )
        read += [row for batch in pair for row in batch if row >= 0]
    assert sorted(read) == [*range(28)]
    half = [global_order.source_of(sizes, batch[0]) for batch in ranks[0][:3]]
    assert {*half} == {"a", "b", "c"}, "a limited validation sees all sources"


def texts(folder: Path) -> dict[str, Source]:
    """200 documents of capitals, 60 of digits."""
    rng = np.random.default_rng(0)
    for name, alphabet, num in (("words", "ABCDEF", 200), ("digits", "0123", 60)):
        lines = [json.dumps({"text": "".join(rng.choice([*alphabet], 90))}) for _ in range(num)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return {name: Jsonl([str(folder / f"{name}.jsonl")]) for name in ("words", "digits")}


def module_of(folder: Path, weights: dict[str, float]) -> DataModule:
    source = Mixture(texts(folder), weights)
    return DataModule(source, Bytes(), 16, 8, 4, cache_dir=str(folder / "cache"), validation_share=0.1)


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
        assert (
            text.isalpha() == (global_order.source_of(rows.sizes, row) == "words") and text.isdigit() != text.isalpha()
        )
        counted += int((batch["labels"] != NOT_COUNTED).sum())
    assert counted == tokens - 2, "each token is a label once, but for the first of each source"
    other = module_of(tmp_path, {"words": 1, "digits": 0})
    assert other.require().folder == corpus.folder
    assert "words" in corpus.describe() and "digits" in corpus.describe()


def test_rows_of_conversations_are_of_one_source(tmp_path: Path) -> None:
    for name, answer in (("short", "no"), ("long", "yes, " * 20)):
        talk = messages(("user", name), ("assistant", answer))
        chats.write(tmp_path / f"{name}.jsonl", [{"messages": [*talk, *messages(*TURNS[1:3])]}] * 9)
    sources: dict[str, Source] = {name: Chat([str(tmp_path / f"{name}.jsonl")]) for name in ("short", "long")}
    source = Mixture(sources, {"short": 1, "long": 1})
    data = DataModule(
        source, Pretrained(str(chats.tokenizer(tmp_path / "tokenizer"))), 256, 2, 2, validation_share=0.0,
        test_share=0.0, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    data.prepare(report=quiet)
    rows = data.rows_of("train")
    for row in range(len(rows)):
        text = data.text_tokenizer.decode(rows.__getitems__([row])["input_ids"][0].tolist())
        assert ("yes, " in text) == (global_order.source_of(rows.sizes, row) == "long")
    with pytest.raises(InputError, match="conversations and plain text"):
        Mixture(sources | {"plain": TextFiles(["a"])}, {"short": 1, "long": 1, "plain": 1})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1}, "data.source.weights is {'a': 1}: give each of a, b a number of at least 0"),
        ({"a": 1, "b": 1, "d": 1}, "data.source.weights is"),
        ({"a": 1, "b": -1}, "at least 0"),
        ({"a": 0, "b": 0}, "not 0 to all"),
    ],
)
def test_weights_that_cannot_be_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Mixture({"a": TextFiles(["a"]), "b": TextFiles(["b"])}, weights)


def test_a_source_without_a_row_is_refused(tmp_path: Path) -> None:
    data = module_of(tmp_path, {"words": 1, "digits": 1})
    data.seq_len = 8000
    data.global_batch_size = data.micro_batch_size = 1
    data.validation_share = data.test_share = 0.0
    with pytest.raises(InputError, match="source 'digits' of data.source has .* fewer than a sequence"):
        data.prepare(report=quiet)


@pytest.mark.slow
def test_a_mixture_trains_on_any_number_of_processes_and_is_evaluated_by_source(tmp_path: Path) -> None:
    texts(tmp_path)
    source = {
        name: {"class_path": "Jsonl", "init_args": {"paths": [str(tmp_path / f"{name}.jsonl")]}}
        for name in ("words", "digits")
    }
    weights = {"sources": source, "weights": {"words": 1, "digits": 1}}
    flags = [
        f"--run.root={tmp_path / 'runs'}", "--run.report=false", "--data.tokenizer=Bytes", "--data.seq_len=16",
        f"--data.source={json.dumps({'class_path': 'Mixture', 'init_args': weights})}",
        f"--data.cache_dir={tmp_path / 'cache'}", "--data.global_batch_size=8", "--data.validation_share=0.1",
        f"--model.architecture={SMALL_LLAMA}", "--model.optim.warmup=1", "--trainer.accelerator=cpu",
        "--trainer.max_steps=6", "--trainer.log_every_n_steps=1", "--trainer.val_check_interval=6",
        "--model.sample_tokens=2", "--trainer.logger=false",
    ]  # fmt: skip
    assert run("fit", *flags, "--data.micro_batch_size=4", "--trainer.devices=1") == 0
    folder = only_run(tmp_path)
    found = {name: logged(folder, name) for name in ("train/loss", "data/words/epochs", "data/digits/epochs")}
    words, digits = (list(found[f"data/{name}/epochs"].values()) for name in ("words", "digits"))
    assert words == sorted({*words}) and digits == sorted({*digits})
    with Workers(2) as workers:
        more = ["--config=strategy/fsdp2", "--trainer.devices=2", "--data.micro_batch_size=2"]
        record = workers.run(["fit", *flags, *more], tmp_path / "two").check()
        cut = ["fit", *flags, *more, "--run.name=cut"]
        first = workers.run(cut, tmp_path / "cut", callbacks=[PauseAfter(4)]).check()
    assert record.loss == pytest.approx(found["train/loss"], rel=1e-5)
    one = ["--data.micro_batch_size=8", "--trainer.devices=1", "--run.name=cut", f"--ckpt_path={newest(first.run)}"]
    assert run("fit", *flags, *one) == 0
    (folder_of_rest,) = {*(tmp_path / "runs" / "cut").iterdir()} - {first.run}
    rest = logged(folder_of_rest, "train/loss")
    assert [rest[step] for step in (5, 6)] == pytest.approx([record.loss[step] for step in (5, 6)], rel=1e-5)
    (metrics,) = [each for step, each in record.eval().items() if step == 6]
    assert metrics["eval/words/loss"] != pytest.approx(metrics["eval/digits/loss"], rel=1e-3)
    for name in ("eval/words/loss", "eval/digits/loss", "eval/digits/token_accuracy"):
        assert metrics[name] == pytest.approx(logged(folder, name)[6], rel=1e-5)
