"""Sources, tokenizers and the cache: what goes in comes out, or is refused in one sentence."""

import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_dev.data import DataModule

from dist_template import InputError
from dist_template.text import ByteBPE, Bytes, HubDataset, Jsonl, Parquet, TextFiles
from dist_template.text.cache.token_cache import SPLITS
from dist_template.text.sources.records import matching
from dist_template.text.tokenizers import EOS
from tests.support.injury import flip_a_bit
from tests.support.library import NOT_COUNTED
from tests.support.runs import SENTENCES, disk, quiet

TEXTS = [
    "def f(x):\n    return x\n", "  two  spaces\tand tabs\r\n", "Grüße, 世界 😀 \x00\x7f",
    f"say {EOS} aloud",
]  # fmt: skip
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
    assert read(TextFiles([f"{tmp_path}/[23].txt", f"{tmp_path}/**/*.txt"])) == TEXTS


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
