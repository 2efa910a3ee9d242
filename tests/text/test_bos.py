"""A plain text starts as `tokenizer(text)` does, in training, evaluation, prompts and services."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_dev.data import DataModule
from transformers import AutoTokenizer

from dist_template import InputError
from dist_template.checkpoint.identity import compare
from dist_template.records import sha256
from dist_template.text import Bytes, Jsonl, Mixture, Preferences, Pretrained, TextFiles
from dist_template.text.tokenizers import added_tokens, encode_prompt
from tests.support.runs import quiet

TEXTS = [f"document {number} says <s> and </s>, " + "ab é " * (number % 9) for number in range(80)]
# kind: the post-processor's template, what starts a document, the tokenizer's arguments
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "none": ("", "", {}),
    "a template": ("<s> $A", "<s>", {}),
    "a flag": ("", "<s>", {"add_bos_token": True}),
    "EOS too": ("<s> $A </s>", "<s>", {}),
    "flags for both": ("", "<s>", {"add_bos_token": True, "add_eos_token": True}),
    "two tokens": ("[C] <s> $A", "[C] <s>", {}),
    "EOS alone": ("$A </s>", "", {}),
    "EOS is BOS": ("</s> $A", "</s>", {"bos_token": "</s>"}),  # as of OPT
    "EOS is the second": ("[C] </s> $A", "[C] </s>", {"bos_token": "</s>"}),
}


def save(folder: Path, kind: str) -> Path:
    """Saves a tokenizer of bytes with a post-processor."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    template, _, options = KINDS[kind]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "[C]"]
    backend.add_special_tokens(special)
    if template:
        ids: Any = [(each, backend.token_to_id(each)) for each in special]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    given = {"bos_token": "<s>", "eos_token": "</s>"} | options
    PreTrainedTokenizerFast(tokenizer_object=backend, **given).save_pretrained(folder)
    return folder


def data_of(folder: Path, kind: str, source: Any = None, **options: Any) -> DataModule:
    path = folder / "texts.jsonl"
    lines = [json.dumps({"text": text}) for text in TEXTS]
    path.write_text("\n".join(lines), encoding="utf-8")
    tokenizer = Pretrained(str(save(folder / "tokenizer", kind)), **options)
    shares: Any = {"validation_share": 0.2, "test_share": 0.2, "cache_dir": str(folder / "cache")}
    return DataModule(source or Jsonl([str(path)]), tokenizer, 33, 2, 2, **shares)


def documents_of(data: DataModule, split: str) -> list[list[int]]:
    tokens = data.corpus.tokens(split).tolist()
    ends = data.documents(split).ends.tolist()
    assert ends[-1] == len(tokens)
    return [tokens[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_and_prompts_start_as_the_tokenizer_has_it(tmp_path: Path, kind: str) -> None:
    data = data_of(tmp_path, kind)
    lines: list[str] = []
    data.prepare(report=lines.append)
    oracle: Any = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    start, end = KINDS[kind][1].split(), oracle.eos_token_id
    assert oracle.convert_ids_to_tokens(data.corpus.start_ids) == start
    num_appended = len(oracle("")["input_ids"]) - len(start)
    for split in ("train", "validation", "test"):
        for text, found in zip(data.documents(split).texts, documents_of(data, split), strict=True):
            ids = oracle(text, split_special_tokens=True)["input_ids"]  # in a text, they are text
            assert found == [*ids[: len(ids) - num_appended], end], "EOS is there once"
    text = TEXTS[1].partition("<")[0]
    ids = oracle(text)["input_ids"]
    assert data.encode_prompt(text) == ids[: len(ids) - num_appended], "and nothing ends a prompt"
    prompt = next(iter(data.predict_dataloader()))["input_ids"][0].tolist()
    assert prompt == data.encode_prompt(data.prompts[0])
    assert f"each text starts with {KINDS[kind][1] or 'no BOS'} and ends with </s>" in lines[-1]
    assert data.bos_token_id == (data.corpus.start_ids or [end])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_do_not_attend_to_each_other(tmp_path: Path, kind: str) -> None:
    """Positions restart where a document starts, where EOS is BOS too."""
    data = data_of(tmp_path, kind)
    data.prepare(report=quiet)
    rows = data.rows_of("train")
    tokens, ends = data.corpus.tokens("train"), set(data.documents("train").ends.tolist())
    for row in range(len(rows)):
        batch = rows.__getitems__([row])
        start, _ = rows._place(row)  # type: ignore[attr-defined]
        assert batch["input_ids"][0].tolist() == tokens[start : start + 33].tolist()
        expected = [0]
        for position in range(start + 1, start + 33):
            expected.append(0 if position in ends else expected[-1] + 1)
        assert batch["position_ids"][0].tolist() == expected
        assert rows.lengths(row).sum() == 33
        assert len(rows.lengths(row)) == expected.count(0)


def test_pairs_of_texts_start_as_documents_do(tmp_path: Path) -> None:
    data = data_of(tmp_path, "EOS too")
    tokenizer = data.tokenizer.fit(iter(()))
    pair = json.dumps({"prompt": "What?", "chosen": " A", "rejected": " B"})
    (encoded,) = Preferences(["a"]).encode(data.tokenizer, tokenizer, [("", pair)])
    ids = encoded.ids.tolist()
    prompt = encode_prompt(tokenizer, "What?")
    half = len(ids) // 2
    assert ids[: len(prompt)] == prompt == ids[half : half + len(prompt)]
    assert Preferences(["a"]).encode_prompt(tokenizer, "What?") == prompt


@pytest.mark.parametrize("kind", ["none", "a template", "EOS too"])
def test_the_key_sets_it_in_what_is_saved(tmp_path: Path, kind: str) -> None:
    for adds, expected in ((True, ["<s>"]), (False, [])):
        data = data_of(tmp_path, kind, add_bos_token=adds)
        saved = data.prepare(report=quiet).tokenizer
        assert saved.convert_ids_to_tokens(added_tokens(saved)[0]) == expected
        first = documents_of(data, "train")[0]
        assert (first[0] == saved.bos_token_id) == adds
        assert saved("ab")["input_ids"][: len(expected)] == data.corpus.start_ids
    with pytest.raises(InputError, match="add_bos_token is true, and .* has no BOS token"):
        folder = tmp_path / "tokenizer"
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": None}))
        Pretrained(str(folder), add_bos_token=True).fit(iter(()))


def test_a_run_from_before_finds_its_cache_and_goes_on(tmp_path: Path) -> None:
    data = data_of(tmp_path, "a template")
    recipe = data._recipe.spec()
    assert recipe["tokenizer"] == {
        "class": "Pretrained",
        "path": str(tmp_path / "tokenizer"),
        "special_tokens": [],
        "eos_token": None,
    }, "its hash names the folder"
    texts = TextFiles(["a"])
    assert texts.spec() == {"class": "TextFiles", "paths": ["a"], "separator": None}
    new = data.prepare(report=quiet)
    content, old = new.content(), data_of(tmp_path, "a template", add_bos_token=False)
    without = old.prepare(report=quiet)
    assert without.folder != new.folder and content.endswith("BOS first (add_bos_token)")
    # The cache that an earlier version made: no BOS, and no word of it in its manifest.
    shutil.copytree(without.folder, new.folder, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "tokenizer", new.folder / "tokenizer", dirs_exist_ok=True)
    manifest = json.loads((new.folder / "manifest.json").read_text())
    saved = (new.folder / "tokenizer").iterdir()
    manifest["tokenizer"] = {path.name: sha256(path) for path in sorted(saved)}
    for key in ("start_ids", "start_tokens", "eos_token", "texts"):
        del manifest[key]
    (new.folder / "manifest.json").write_text(json.dumps(manifest))
    data, lines = data_of(tmp_path, "a template"), []
    assert data.prepare(report=lines.append).folder == new.folder
    assert "starts without <s>, which prompts have" in lines[-1]
    before, now = ({"data.source": each.content()} for each in (data.corpus, without))
    assert compare("a.ckpt", before, now, []) == [], "add_bos_token false makes it again"
    assert data.rows_of("train").__getitems__([0])["input_ids"].shape == (1, 33)
    assert len(documents_of(data, "train")) == manifest["splits"]["train"]["documents"]
    with pytest.raises(InputError, match=r"now .*, BOS first \(add_bos_token\): "):
        compare("a.ckpt", before, {"data.source": content}, [])
    assert len(json.dumps(content)) <= 80, "a longer value would be shown as a hash"


def test_a_mixture_starts_documents_once_and_bytes_have_no_start(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    source = Mixture({"a": Jsonl([str(path)]), "b": Jsonl([str(path)])}, {"a": 1, "b": 2})
    data = data_of(tmp_path, "a template", source)
    corpus = data.prepare(report=quiet)
    assert documents_of(data, "train")[0][0] == corpus.start_ids[0]
    assert np.count_nonzero(corpus.tokens("train") == corpus.start_ids[0]) == len(
        data.documents("train").texts
    )
    data.tokenizer = Bytes()
    corpus = data.prepare(report=quiet)
    assert corpus.start_ids == [] and data.bos_token_id == data.eos_token_id == 256


def test_what_is_done_to_texts_is_counted(tmp_path: Path) -> None:
    data = data_of(tmp_path, "none")
    with (tmp_path / "texts.jsonl").open("a") as file:
        file.writelines(['\n{"text": ""}\n{"text": " \\n"}\n', '{"text": "half \\ud83d of one"}\n'])
    lines: list[str] = []
    for _ in range(2):  # when it is made, and when it is there
        data.prepare(report=lines.append)
        assert lines[-1].splitlines()[-2:] == [
            "  empty texts, skipped: 2",
            "  texts with half of a surrogate pair, written as ?: 1",
        ]
    assert any("half ? of one" in data.documents(split).texts for split in ("train", "test"))
