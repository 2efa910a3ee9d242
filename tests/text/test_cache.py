"""Sources, tokenizers, the cache: what goes in comes out; a mixture gives each source its share."""

import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
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
from dist_template.callbacks import global_order
from dist_template.text import (
    ByteBPE,
    Bytes,
    HubDataset,
    Jsonl,
    Mixture,
    Parquet,
    Source,
    TextFiles,
)
from dist_template.text.batches.rows import NOT_COUNTED
from dist_template.text.cache.token_cache import SPLITS
from dist_template.text.sources import mixture
from dist_template.text.sources.records import matching
from dist_template.text.tokenizers import EOS
from tests.support.injury import flip_a_bit
from tests.support.parity import PauseAfter
from tests.support.runs import SENTENCES, Workers, disk, logged, newest, only_run, quiet, run, small
from tests.support.strategies import flags_of

TEXTS = [
    "def f(x):\n    return x\n",
    "  two  spaces\tand tabs\r\n",
    "Grüße, 世界 😀 \x00\x7f",
    f"say {EOS} aloud",
]
EVERY_BYTE = "".join(map(chr, range(0x250)))  # all lead bytes of two-byte characters


def read(source: Any) -> list[str]:
    return [text for _, text in source.documents()]


def refusal(call: Callable[..., object], *given: Any) -> str:
    with pytest.raises(InputError) as caught:
        call(*given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_text_files_are_read_in_one_order_each_once_and_to_the_byte(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    paths = [f"{tmp_path}/[23].txt", f"{tmp_path}/**/*.txt"]
    assert read(TextFiles(paths, encoding="utf-8")) == TEXTS  # one has a NUL


def test_links_in_a_circle_give_each_file_once(tmp_path: Path) -> None:
    tree = tmp_path / "corpus"
    for name in ("a.txt", "deep/b.txt", "deep/er/c.txt", ".hidden/d.txt"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    (tree / "loop").symlink_to(tree, target_is_directory=True)
    (tree / "deep" / "again.txt").symlink_to(tree / "a.txt")
    found = [path.relative_to(tree).as_posix() for path in matching([f"{tree}/**/*.txt"])]
    assert found == ["a.txt", "deep/b.txt", "deep/er/c.txt"]
    assert f"{tree}/**/*" in refusal(read, TextFiles([str(tree)])), "how to write a folder"


@pytest.mark.slow
def test_changed_files_in_a_store_are_copied(s3: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = ("a/one.txt", "b/one.txt")  # equal names in two folders
    for name in names:
        s3.pipe_file(f"bucket/corpus/{name}", name.encode())
    source = TextFiles(["s3://bucket/corpus/**/*.txt"])
    assert read(source) == [*names]
    before = [path.stat().st_mtime_ns for path in source.files()]
    s3.pipe_file("bucket/corpus/b/one.txt", b"changed")
    assert read(source) == ["a/one.txt", "changed"]
    after = [path.stat().st_mtime_ns for path in source.files()]
    assert after[0] == before[0] and after[1] != before[1], "only what has changed is copied"
    assert "no file" in refusal(read, TextFiles(["s3://bucket/corpus/*.json"]))
    assert "bucket does not exist" in refusal(read, TextFiles(["s3://other/one.txt"]))
    text = refusal(read, TextFiles(["s3://key:password@bucket/*.txt"]))
    assert "user" in text and "password" not in text


def test_records_give_their_field_or_say_which_there_are(tmp_path: Path, monkeypatch: Any) -> None:
    import pyarrow
    import pyarrow.parquet
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "hf")
    table, folder = pyarrow.table({"body": TEXTS, "id": [*range(4)]}), tmp_path / "set"
    folder.mkdir()
    path, lines = tmp_path / "a.parquet", folder / "train.jsonl"
    pyarrow.parquet.write_table(table, path)
    lines.write_text("".join(json.dumps(one) + "\n" for one in table.to_pylist()))
    for kind, name in ((Parquet, [str(path)]), (Jsonl, [str(lines)]), (HubDataset, str(folder))):
        assert read(kind(name, field="body")) == TEXTS
        assert "'text'" in refusal(read, kind(name)) and "body, id" in refusal(read, kind(name))
    assert ":1, which has body, id" in refusal(read, Jsonl([str(lines)], "id")), "it is no text"
    assert "nowhere" in refusal(read, HubDataset(str(folder), split="nowhere"))
    path.write_bytes(path.read_bytes()[:-9])
    assert str(path) in refusal(read, Parquet([str(path)], "body"))


@pytest.mark.parametrize("spec", [Bytes(), ByteBPE(vocab_size=400)], ids=["bytes", "bpe"])
def test_any_text_comes_back_and_an_end_in_the_text_stays_text(spec: Any) -> None:
    texts = [*TEXTS, EVERY_BYTE]
    tokenizer = spec.fit(iter(texts * 20))
    for text, ids in zip(texts, spec.encode(tokenizer, texts), strict=True):
        assert tokenizer.decode(ids.tolist()) == text
        assert tokenizer.eos_token_id not in ids


def test_bpe_learns_from_the_train_split_alone(tmp_path: Path) -> None:
    seen: list[str] = []

    class Recorded(ByteBPE):
        def fit(self, texts: Any) -> Any:
            seen.extend(texts)
            return super().fit(iter(seen))

    source = TextFiles([str(Path(__file__))], separator="\n\n")
    shares: Any = {"validation_share": 0.2, "test_share": 0.2, "cache_dir": str(tmp_path)}
    data = DataModule(source, Recorded(300), 16, 2, 2, **shares)
    data.prepare()
    assert seen and {data._recipe.split_of(text) for text in seen} == {"train"}
    assert len(seen) == data.require().manifest["splits"]["train"]["documents"]


def documents_of(data: DataModule, split: str) -> list[str]:
    corpus = data.require()
    tokens = corpus.tokens(split)
    *documents, rest = np.split(tokens, np.flatnonzero(tokens == data.eos_token_id) + 1)
    assert not len(rest), "the last document has its end"
    return [corpus.tokenizer.decode(each[:-1].tolist()) for each in documents]


@pytest.mark.parametrize("tokenizer", [Bytes(), ByteBPE(vocab_size=300)], ids=["bytes", "bpe"])
def test_the_cache_holds_every_document_once(data: DataModule, texts: Path, tokenizer: Any) -> None:
    data.tokenizer = tokenizer
    corpus = data.prepare(report=quiet)
    held = {split: documents_of(data, split) for split in SPLITS}
    assert all(held.values())
    written = [path.read_text(encoding="utf-8") for path in texts.iterdir()]
    assert Counter(text for documents in held.values() for text in documents) == Counter(written)
    for split, documents in held.items():
        assert corpus.num_bytes(split) == sum(len(text.encode()) for text in documents)
        assert os.path.getsize(corpus.folder / f"{split}.bin") == 2 * corpus.num_tokens(split)


def test_rows_count_every_token_once_and_only_the_last_is_not_full(data: DataModule) -> None:
    tokens = np.asarray(data.prepare(report=quiet).tokens("train")).astype(np.int64)
    rows = data.rows_of("train")
    assert (len(tokens) - 1) % 32, "the test needs a last row that is not full"
    batch = rows.__getitems__(list(range(len(rows))))
    assert batch["labels"][batch["labels"] != NOT_COUNTED].tolist() == tokens[1:].tolist()
    assert batch["input_ids"][:-1].flatten().tolist() == tokens[: (len(rows) - 1) * 32].tolist()
    assert batch["input_ids"][-1].tolist() == tokens[-33:-1].tolist()
    full = (batch["labels"] != NOT_COUNTED).all(dim=1).tolist()
    assert full == [True] * (len(rows) - 1) + [False]


def test_positions_restart_after_each_end_of_a_document(data: DataModule) -> None:
    data.prepare(report=quiet)
    batch = next(iter(data.train_dataloader()))
    ends = batch["input_ids"] == data.eos_token_id
    assert ends[:, :-1].any()
    for row, positions in zip(ends.tolist(), batch["position_ids"].tolist(), strict=True):
        expected = [0]
        for is_end in row[:-1]:
            expected.append(0 if is_end else expected[-1] + 1)
        assert positions == expected
    data.cross_document_attention = True
    batch = next(iter(data.train_dataloader()))
    assert batch["position_ids"].tolist() == [list(range(32))] * 8


def test_a_stale_cache_is_refused_until_prepared_again(data: DataModule, texts: Path) -> None:
    data.prepare(report=quiet)
    path = texts / "03.txt"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.upper(), encoding="utf-8")  # of the same size
    os.utime(path, ns=(1, 1))
    assert "stale" in refusal(data.require) and "03.txt has changed" in refusal(data.require)
    (texts / "new.txt").write_text("one more", encoding="utf-8")
    assert "new.txt came or went" in refusal(data.require)
    data.check_source = False
    data.require()
    data.check_source = True
    data.prepare(report=quiet)
    assert text.upper() in [text for split in SPLITS for text in documents_of(data, split)]
    data.source = TextFiles([f"{texts}/*.txt"], separator="!")
    assert "no token cache" in refusal(data.require), "other arguments have another cache"


def no_manifest(path: Path) -> None:
    path.write_text('{"dtype": 3}', encoding="utf-8")


HARMS: list[tuple[str, Any]] = [("train.bin", flip_a_bit), ("tokenizer/tokenizer.json", flip_a_bit)]
HARMS += [("manifest.json", Path.unlink), ("manifest.json", no_manifest)]
HARMS += [("test.bin", lambda path: os.truncate(path, 10))]


@pytest.mark.parametrize(("name", "harm"), HARMS)
def test_a_damaged_cache_is_refused_and_repaired(data: DataModule, name: str, harm: Any) -> None:
    harm(data.prepare(report=quiet).folder / name)
    lines: list[str] = []
    assert "damaged" in refusal(data.require)
    data.prepare(report=lines.append)
    assert "damaged" in lines[0]
    data.require()


def test_a_second_prepare_at_the_same_time_is_refused(data: DataModule) -> None:
    corpus = data.prepare(report=quiet)
    with open(f"{corpus.folder}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        data.prepare(report=quiet)  # what is ready can be used all the same
        shutil.rmtree(corpus.folder)
        with pytest.raises(InputError, match="another `prepare` is filling"):
            data.prepare(report=quiet)
    data.prepare(report=quiet)  # the lock is released when its holder exits


def test_a_full_disk_leaves_an_older_cache(data: DataModule, texts: Path, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "256k") as tiny:
        data.cache_dir = str(tiny)
        folder = data.prepare(report=quiet).folder
        before = {path.name: path.read_bytes() for path in folder.glob("*.bin")}
        (texts / "large.txt").write_text(SENTENCES * 5000, encoding="utf-8")
        with pytest.raises(InputError, match="is full and nothing was kept"):
            data.prepare(report=quiet)
        assert {path.name for path in tiny.iterdir()} == {folder.name, folder.name + ".lock"}
        assert {path.name: path.read_bytes() for path in folder.glob("*.bin")} == before
        (texts / "large.txt").unlink()
        data.require()


PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
NAMES = ("a", "b", "c")
WEIGHTS = st.fixed_dictionaries({name: st.sampled_from([0.0, 0.1, 1.0, 3.0]) for name in NAMES})
CHANGES = st.lists(
    st.tuples(st.integers(1, 3000), WEIGHTS.filter(lambda weights: any(weights.values()))),
    min_size=1,
    max_size=3,
    unique_by=lambda change: change[0],
).map(lambda changes: [(0, changes[0][1]), *sorted(changes[1:])])
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
        "fit",
        *small(tmp_path, tmp_path / "cache", tmp_path),
        "--data.seq_len=16",
        f"--data.source={json.dumps({'class_path': 'Mixture', 'init_args': weights})}",
        "--data.validation_share=0.1",
        "--data.test_share=0",
        "--model.optim.warmup=1",
        "--trainer.max_steps=6",
        "--trainer.val_check_interval=6",
        "--trainer.logger=false",
    ]
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
