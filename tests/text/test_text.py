"""Sources and tokenizers: each kind reads back what was written, and names what it could not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trainer_dev.data import DataModule

from dist_template import InputError
from dist_template.text import ByteBPE, Bytes, HubDataset, Jsonl, Parquet, TextFiles
from dist_template.text.sources.records import matching
from dist_template.text.tokenizers import EOS

TEXTS = [
    "def f(x):\n    return x\n", "  two  spaces\tand tabs\r\n", "Grüße, 世界 😀 \x00\x7f",
    f"say {EOS} aloud",
]  # fmt: skip
EVERY_BYTE = "".join(map(chr, range(0x250)))  # all lead bytes of two-byte characters


def read(source: Any) -> list[str]:
    return [text for _, text in source.documents()]


def error_of(source: Any) -> str:
    with pytest.raises(InputError) as caught:
        read(source)
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
    assert f"{tree}/**/*" in error_of(TextFiles([str(tree)])), "how to write a folder"


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
        assert "'text'" in error_of(kind(name)) and "body, id" in error_of(kind(name))
    assert ":1, which has body, id" in error_of(Jsonl([str(lines)], "id")), "it is no text"
    assert "nowhere" in error_of(HubDataset(str(folder), split="nowhere"))
    path.write_bytes(path.read_bytes()[:-9])
    assert str(path) in error_of(Parquet([str(path)], "body"))


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


def test_shares_that_leave_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="nothing to train on"):
        DataModule(validation_share=0.5, test_share=0.5).check(world_size=1)
