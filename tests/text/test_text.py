"""Sources and tokenizers: each kind reads back what was written, and names what it could not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trainer_dev.data import DataModule

from dist_template import InputError
from dist_template.text import (
    ByteBPE,
    Bytes,
    HubDataset,
    Jsonl,
    Parquet,
    Pretrained,
    Source,
    TextFiles,
    TokenizerSpec,
)
from dist_template.text.sources.records import matching
from dist_template.text.tokenizers import EOS

TEXTS = [
    "def f(x):\n    return x\n", "  two  spaces\tand tabs\r\n", "Grüße, 世界 😀 \x00\x7f",
    f"say {EOS} aloud",
]  # fmt: skip
EVERY_BYTE = "".join(map(chr, range(0x250)))  # all lead bytes of two-byte characters


def read(source: Source) -> list[str]:
    return [text for _, text in source.documents()]


def error_of(source: Source) -> str:
    with pytest.raises(InputError) as caught:
        read(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_text_files_are_read_in_one_order_each_once_and_to_the_byte(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    assert read(TextFiles([f"{tmp_path}/[23].txt", f"{tmp_path}/**/*.txt"])) == TEXTS


def test_paths_that_match_nothing_are_named(tmp_path: Path) -> None:
    (tmp_path / "there.txt").write_text("text", encoding="utf-8")
    message = error_of(TextFiles([f"{tmp_path}/there.txt", f"{tmp_path}/*.rst"]))
    assert f"{tmp_path}/*.rst" in message and "there.txt" not in message
    assert f"{tmp_path}/**/*" in error_of(TextFiles([str(tmp_path)]))  # how to write a folder


def write_jsonl(path: Path, field: str = "text") -> Path:
    lines = [json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(TEXTS)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_a_missing_field_is_reported_with_the_existing_ones(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", "body")
    message = error_of(Jsonl([str(path)]))
    assert "'text'" in message and "body, id" in message and str(path) in message
    assert ":1, which has body, id" in error_of(Jsonl([str(path)], "id"))  # it is no text


def test_parquet_gives_its_column(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": TEXTS, "id": [*range(4)]}), path)
    assert read(Parquet([str(path)], "body")) == TEXTS
    assert "body, id" in error_of(Parquet([str(path)], "text"))
    path.write_bytes(path.read_bytes()[:-9])
    assert str(path) in error_of(Parquet([str(path)], "body"))


def test_a_datasets_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "hf")
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl")
    assert read(HubDataset(str(folder))) == TEXTS
    assert "nowhere" in error_of(HubDataset(str(folder), split="nowhere"))


def test_a_custom_source_is_one_class(tmp_path: Path) -> None:
    class Squares(Source):
        def __init__(self, count: int) -> None:
            self.count = count

        def documents(self):
            return ((str(i), f"{i} squared is {i * i}") for i in range(self.count))

    data = DataModule(Squares(500), Bytes(), 16, cache_dir=str(tmp_path))
    assert data.prepare().manifest["spec"]["source"] == {"class": "Squares", "count": 500}
    data.source = Squares(501)
    with pytest.raises(InputError, match="no token cache"):
        data.require()


@pytest.mark.parametrize("spec", [Bytes(), ByteBPE(vocab_size=400)], ids=["bytes", "bpe"])
def test_any_text_comes_back_and_an_end_in_the_text_stays_text(spec: TokenizerSpec) -> None:
    texts = [*TEXTS, EVERY_BYTE]
    tokenizer = spec.fit(iter(texts * 20))
    for text, ids in zip(texts, spec.encode(tokenizer, texts), strict=True):
        assert tokenizer.decode(ids.tolist()) == text
        assert tokenizer.eos_token_id not in ids


def test_bpe_learns_from_the_train_split_alone(tmp_path: Path) -> None:
    class Recorded(ByteBPE):
        seen: list[str] = []

        def fit(self, texts):
            self.seen[:] = texts
            return super().fit(iter(self.seen))

    source = TextFiles([str(Path(__file__))], separator="\n\n")
    shares: Any = {"validation_share": 0.2, "test_share": 0.2, "cache_dir": str(tmp_path)}
    data = DataModule(source, Recorded(300), 16, 2, 2, **shares)
    data.prepare()
    assert Recorded.seen
    assert {data._recipe.split_of(text) for text in Recorded.seen} == {"train"}
    assert len(Recorded.seen) == data.require().manifest["splits"]["train"]["documents"]


def test_a_saved_tokenizer_serves_as_a_pretrained_one(tmp_path: Path) -> None:
    made = ByteBPE(vocab_size=300)
    tokenizer = made.fit(iter(TEXTS * 9))
    tokenizer.save_pretrained(tmp_path)
    spec = Pretrained(str(tmp_path))
    loaded = spec.fit(iter([]))
    assert loaded.eos_token_id == tokenizer.eos_token_id
    found, expected = spec.encode(loaded, TEXTS), made.encode(tokenizer, TEXTS)
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in expected]
    assert tmp_path / "tokenizer.json" in spec.files()


def test_sizes_that_do_not_divide_and_shares_that_leave_nothing_are_refused() -> None:
    data = DataModule(global_batch_size=100, micro_batch_size=8)
    sizes = "global_batch_size 100 is not a multiple of micro_batch_size 8 x data_parallel 4 = 32"
    with pytest.raises(InputError, match=f"^{sizes}; edit data."):
        data.check(world_size=4)
    with pytest.raises(InputError, match="nothing to train on"):
        DataModule(validation_share=0.5, test_share=0.5).check(world_size=1)


def test_links_in_a_circle_give_each_file_once(tmp_path: Path) -> None:
    tree = tmp_path / "corpus"
    for name in ("a.txt", "deep/b.txt", "deep/er/c.txt", ".hidden/d.txt"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    (tree / "loop").symlink_to(tree, target_is_directory=True)
    (tree / "deep" / "again.txt").symlink_to(tree / "a.txt")
    found = [path.relative_to(tree).as_posix() for path in matching([f"{tree}/**/*.txt"])]
    assert found == ["a.txt", "deep/b.txt", "deep/er/c.txt"]
