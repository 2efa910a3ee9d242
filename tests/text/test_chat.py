"""Conversations: every usual shape is read, and what is trained on is what the template marks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_template import InputError
from dist_template.text import Chat
from tests.support import chats
from tests.support.chat_corpus import GOOD, counted_text, prepared, refused
from tests.support.chats import TURNS, messages, write
from tests.support.library import BOUNDS, NOT_COUNTED

FROM = {"system": "system", "user": "human", "assistant": "gpt"}


def read(source: Chat) -> list[Any]:
    return [json.loads(text) for _, text in source.documents()]


def test_all_shapes_give_the_same_conversation(tmp_path: Path) -> None:
    expected = [{"messages": messages(*TURNS)}]
    turns = [{"from": FROM[role], "value": content} for role, content in TURNS]
    shapes = {
        "messages": {"messages": messages(*TURNS), "prompt": "another shape's key", "id": 3},
        "conversations": {"conversations": turns},
        "prompt": {"prompt": messages(*TURNS[:-1]), "completion": messages(TURNS[-1])},
    }
    for name, record in shapes.items():
        assert read(Chat([str(write(tmp_path / f"{name}.jsonl", [record]))])) == expected, name
    pair = write(tmp_path / "pair.jsonl", [{"prompt": "One?", "completion": "Uno."}])
    assert read(Chat([str(pair)])) == [{"messages": messages(*TURNS[1:3])}]


def test_arrays_archives_parquet_and_hub_folders_are_read(tmp_path: Path, monkeypatch) -> None:
    import pyarrow
    import pyarrow.parquet
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "hf")
    records = [{"messages": messages(*TURNS)}, {"messages": messages(*TURNS[1:3])}]
    (tmp_path / "a.json").write_text(json.dumps(records))
    lines = "\n".join(map(json.dumps, records)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", records)
    for path in ("a.json", "a.jsonl.gz", "a.parquet"):
        assert read(Chat([str(tmp_path / path)])) == records, path
    assert read(Chat(name=str(tmp_path / "set"))) == records


BAD = {
    "no assistant": ({"messages": messages(("user", "One?"))}, "no assistant turn"),
    "role": ({"messages": [{"content": "x"}]}, "a turn without a role: give messages"),
    "content": ({"messages": [{"role": "user", "content": 3}]}, "content is no text"),
    "no object": ([GOOD], "is no JSON object"),
    "keys": ({"text": "a"}, "only text: give messages"),
    "tools": ({**GOOD, "tools": "{"}, "tools that are not JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_record_is_one_sentence_with_file_and_line(case: str, tmp_path: Path) -> None:
    record, sentence = BAD[case]
    path = write(tmp_path / "bad.jsonl", [GOOD, record])
    with pytest.raises(InputError, match=sentence) as caught:
        read(Chat([str(path)]))
    assert f"{path}:2" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["qwen3", "llama3", "deepseekv3"])
def test_a_conversation_is_rendered_as_published(family: str, tmp_path: Path) -> None:
    """test_families.py shows what counts."""
    path = write(tmp_path / "a.jsonl", [GOOD])
    data = prepared(tmp_path, Chat([str(path)]), family)
    published = data.text_tokenizer.apply_chat_template(messages(*TURNS), tokenize=False)
    trained = data.text_tokenizer.decode(data.corpus.tokens("train"))
    if family == "qwen3":  # docs/finetune.md has these two differences
        assert (published.count("<think>"), trained.count("<think>")) == (1, 2)
        published = published.replace("<think>\n\n</think>\n\n", "")
        trained = trained.replace("<think>\n\n</think>\n\n", "")
    assert trained == published
    assert data.text_tokenizer.chat_template == chats.published(family), "what is exported serves"


def test_what_counts_is_all_answers_the_last_or_everything(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [GOOD])
    template = tmp_path / "own.jinja"
    template.write_text(chats.TAGGED)
    own: Any = {"paths": [str(path)], "template": str(template)}
    answers = ["Uno.<|im_end|>", "Due, ok.<|im_end|>"]
    assert counted_text(prepared(tmp_path, Chat(**own))) == answers
    assert counted_text(prepared(tmp_path, Chat(**own, train_on="last"))) == answers[1:]
    everything = Chat([str(path)], train_on="all")
    (whole,) = counted_text(prepared(tmp_path, everything, template=chats.UNTAGGED))
    assert whole.startswith("<|im_start|>system\nBe brief.") and whole.endswith(f"{answers[1]}\n")


def test_a_template_without_marks_is_refused_and_named(tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(chats.UNTAGGED)
    assert f"{str(own)!r} has no {{% generation %}} tags" in refused(tmp_path, template=str(own))
    assert "is no file" in refused(tmp_path, template=str(tmp_path / "missing.jinja"))


def test_an_empty_mask_is_refused_with_template_and_line(tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(chats.TAGGED.replace("m.role == 'assistant'", "m.content == 'Uno.'"))
    records = [GOOD, {"messages": messages(("user", "a"), ("assistant", "b"))}]
    message = refused(tmp_path, template=str(own), records=records)
    assert message.startswith(f"{own} marks no token of {tmp_path}/a.jsonl:2 as the assistant's")


def many(tmp_path: Path, number: int = 40) -> Path:
    rng = np.random.default_rng(0)
    answers = ["ab" * int(rng.integers(1, 60)) for _ in range(number)]
    talks = [messages(("user", f"{i}?"), ("assistant", each)) for i, each in enumerate(answers)]
    records = [{"messages": talk} for talk in talks]
    return write(tmp_path / "many.jsonl", records)


def test_rows_hold_whole_conversations_that_do_not_attend_to_each_other(tmp_path: Path) -> None:
    data = prepared(tmp_path, Chat([str(many(tmp_path))]), template=chats.TAGGED)
    rows = data.rows_of("train")
    batch = rows.__getitems__(list(range(len(rows))))
    corpus = data.corpus
    tokens, counted, starts = (of("train") for of in (corpus.tokens, corpus.counted, corpus.starts))
    documents = {
        tuple(tokens[a : b - 1].tolist()): counted[a + 1 : b].copy()
        for a, b in zip(starts, starts[1:], strict=False)
    }
    inputs, labels = batch["input_ids"].flatten(), batch["labels"].flatten()
    bounds = batch[BOUNDS].tolist()
    found = 0
    for start, end in zip(bounds, bounds[1:], strict=False):
        assert batch["position_ids"].flatten()[start:end].tolist() == list(range(end - start))
        mask = documents.get(tuple(inputs[start:end].tolist()))
        if mask is None:
            assert (labels[start:end] == NOT_COUNTED).all(), "it is padding, at a row's end"
            assert end % 256 == 0
            continue
        found += 1
        assert ((labels[start:end] != NOT_COUNTED).numpy() == mask).all()
        assert (labels[start : end - 1][mask[:-1]] == inputs[start + 1 : end][mask[:-1]]).all()
    assert found == len(documents) == 40


def test_a_conversation_longer_than_a_row_is_cut_or_dropped_and_counted(tmp_path: Path) -> None:
    records = [GOOD] * 3
    for question, answer in (("a", "b" * 400), ("a" * 400, "b")):  # no answer is left of the second
        records += [{"messages": messages(("user", question), ("assistant", answer))}]
    source = Chat([str(write(tmp_path / "a.jsonl", records))])
    data = prepared(tmp_path, source, template=chats.TAGGED)
    lines: list[str] = []
    data.prepare(report=lines.append)
    packing = data.rows_of("train").packing
    assert (packing.num_cut, packing.num_dropped, len(packing.documents)) == (1, 1, 4)
    assert "longer than a row: 1 cut, 1 without an answer dropped" in "\n".join(lines)


@pytest.mark.parametrize("kind", ["starts", "counted"])
def test_a_damaged_file_of_conversations_is_refused(kind: str, tmp_path: Path) -> None:
    data = prepared(tmp_path, Chat([str(many(tmp_path))]), template=chats.TAGGED)
    path = data.corpus.folder / f"train.{kind}"
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1, *content[1:]]))
    with pytest.raises(InputError, match=f"train.{kind} has another checksum"):
        data.require()


@pytest.mark.parametrize("family", ["gemma3", "llama3", "lfm2", "qwen3_instruct_2507"])
def test_without_marks_the_same_tokens_count(family: str, tmp_path: Path) -> None:
    other = {"messages": messages(*TURNS[1:3], ("user", "ß?"), ("assistant", "日 ß"))}
    path, text = write(tmp_path / "a.jsonl", [GOOD, other]), chats.published(family)
    marked = counted_text(prepared(tmp_path / "marked", Chat([str(path)]), template=text))
    unknown = text + "{# a family that trl does not know #}"
    assert counted_text(prepared(tmp_path, Chat([str(path)]), template=unknown)) == marked != []


ENDS = "{{ m.content }}<|im_end|>{% else %}"
PROMPTS = "{% if add_generation_prompt %}<|im_start|>"
CHANGES = {
    "an answer without an end": (ENDS, "{{ m.content }}{% else %}"),
    "another prompt": (PROMPTS, "{% if add_generation_prompt %}<start>"),
    "another content": (ENDS, "{{ m.content[1:] }}<|im_end|>{% else %}"),
    "another last turn": (ENDS,
        "{{ m.content }}{% if loop.last %}<last>{% endif %}<|im_end|>{% else %}"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_answers_that_cannot_be_told_from_a_prompt_are_refused(what: str, tmp_path: Path) -> None:
    was, becomes = CHANGES[what]
    assert was in chats.UNTAGGED, what
    said = refused(tmp_path, tokenizers=chats.UNTAGGED.replace(was, becomes))
    assert "a.jsonl:1" in said
    assert "message 3 does not continue a server's prompt, or has no end" in said
    assert "give data.source.template" in said
