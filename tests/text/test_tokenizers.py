"""Tokenizers as they are published: sentencepiece and tiktoken models, slow ones. Each is read as
its own library reads it, or refused with a reason."""

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_template import InputError
from dist_template.text import Pretrained

TEXTS = ["the quick brown fox", "Grüße, 世界 😀", "  two  spaces", "line\n\nline\t12 345", "don't"]
LINES = [f"the quick brown fox jumps over the lazy dog, number {n}\n" for n in range(300)]
# The pattern of Llama 3, which transformers assumes of a tiktoken file: the file has none.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def fitted(folder: Path) -> Any:
    return Pretrained(str(folder)).fit(iter(()))


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        fitted(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def configured(folder: Path, **given: Any) -> Path:
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | given
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def sentencepiece_model(folder: Path, **options: Any) -> Any:
    """Trains a model into the folder, and returns its own library's reader."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=330,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


LLAMA: dict[str, Any] = {  # as Llama's model was trained
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
}


def test_a_sentencepiece_model_gives_its_own_tokens(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    folder = configured(tmp_path / "a", tokenizer_class="LlamaTokenizer", add_bos_token=True)
    oracle = sentencepiece_model(folder, **LLAMA)
    tokenizer = fitted(folder)
    for text in TEXTS:
        if "  " in text:
            continue  # transformers (5.23) merges blanks in another order
        assert tokenizer(text)["input_ids"] == [oracle.bos_id(), *oracle.encode(text)], text
    (ids,) = Pretrained(str(folder)).encode(tokenizer, ["the fox"])
    assert ids.tolist() == oracle.encode("the fox")
    folder = configured(tmp_path / "b", tokenizer_class="T5Tokenizer", pad_token="<pad>")
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    oracle = sentencepiece_model(folder, model_type="unigram", **ids)
    assert fitted(folder)(TEXTS[0])["input_ids"] == [*oracle.encode(TEXTS[0]), 1]


@pytest.mark.parametrize(
    "config, options",
    [
        ({}, LLAMA),
        ({"tokenizer_class": "LlamaTokenizer"}, {"model_type": "unigram", "byte_fallback": True}),
    ],
)
def test_a_sentencepiece_model_that_is_read_otherwise_is_refused(
    tmp_path: Path, config: Any, options: Any
) -> None:
    """Without its class, transformers does not begin a text with a space; Llama's is BPE."""
    pytest.importorskip("sentencepiece")
    folder = configured(tmp_path / "a", **config)
    sentencepiece_model(folder, **options)
    found = refusal(folder)
    assert "transformers reads its tokenizer.model as" in found
    assert "name the class of its model in tokenizer_config.json" in found


TIKTOKEN = "".join(
    f"{base64.b64encode(token).decode()} {rank}\n"
    for rank, token in enumerate([*(bytes([n]) for n in range(256)), b"th", b"the", b" the"])
)


def test_a_tiktoken_model_gives_its_own_tokens(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    from tiktoken.load import load_tiktoken_bpe

    folder = configured(tmp_path / "a", tokenizer_class="PreTrainedTokenizerFast")
    (folder / "tokenizer.model").write_text(TIKTOKEN)
    ranks = load_tiktoken_bpe(str(folder / "tokenizer.model"))
    oracle = tiktoken.Encoding("a", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    tokenizer = fitted(folder)
    for text in TEXTS:
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == oracle.encode(text)
        assert tokenizer.decode(oracle.encode(text)) == text


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for package in ("sentencepiece", "tiktoken"):
        monkeypatch.setitem(sys.modules, package, None)
    yield


@pytest.mark.usefixtures("without")
def test_the_package_that_a_model_needs_is_named(tmp_path: Path) -> None:
    folder = configured(tmp_path / "a", tokenizer_class="LlamaTokenizer")
    for data, package in ((TIKTOKEN.encode(), "tiktoken"), (b"\x0a\x0e\x0a\x05<unk>", "sentence")):
        (folder / "tokenizer.model").write_bytes(data)
        found = refusal(folder)
        assert f"needs the package {package}" in found and f"pip install {package}" in found


def test_slow_tokenizers_are_refused_with_their_class(tmp_path: Path) -> None:
    folder = configured(tmp_path / "a", tokenizer_class="CTRLTokenizer")
    vocabulary = {"<unk>": 0, "</s>": 1, "a</w>": 2, "b</w>": 3, "a": 4}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version\na b</w> 1\n\n")
    assert "is a slow tokenizer (CTRLTokenizer, in Python)" in refusal(folder)
    folder = configured(tmp_path / "b", tokenizer_class="ByT5Tokenizer")
    assert "it needs a tokenizer.json" in refusal(folder)


def test_files_that_are_no_model_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    folder = configured(tmp_path / "a", tokenizer_class="LlamaTokenizer")
    for data in (b"", b"hello", bytes(100), b"version https://git-lfs.github.com/spec/v1\n"):
        (folder / "tokenizer.model").write_bytes(data)
        assert "data.tokenizer.path" in refusal(folder)
