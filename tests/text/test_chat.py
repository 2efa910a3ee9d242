"""Conversations: every usual shape is read, and what is trained on is what the template marks."""

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from trainer_dev.data import DataModule

from dist_template import InputError
from dist_template.text.batches.rows import NOT_COUNTED
from dist_template.text.model.kernels import BOUNDS
from tests.support import chats
from tests.support.chats import TURNS, messages, prepared, read, write

TALK = messages(*TURNS)
GOOD = {"messages": TALK}
FROM = {"system": "system", "user": "human", "assistant": "gpt"}


def test_all_shapes_give_the_same_conversation(tmp_path: Path) -> None:
    shapes: list[Any] = [
        GOOD | {"prompt": "another shape's key", "id": 3},
        {"conversations": [{"from": FROM[role], "value": content} for role, content in TURNS]},
        {"prompt": messages(*TURNS[:-1]), "completion": messages(TURNS[-1])},
        {"instruction": "Two?", "input": "", "output": "Due, ok.", "system": "Be brief."}
        | {"history": [["One?", "Uno."]]},
        {"messages": [m | {"content": [{"type": "text", "text": m["content"]}]} for m in TALK]},
    ]
    (tmp_path / "a.json").write_text(json.dumps(shapes))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert read(tmp_path / "*.js*") == [GOOD] * 6
    pair = write(tmp_path / "pair.jsonl", [{"prompt": "One?", "completion": "Uno."}])
    assert read(pair) == [{"messages": messages(*TURNS[1:3])}]


def test_other_names_of_keys_are_read(tmp_path: Path) -> None:
    said = [{"who": role, "what": content} for role, content in TURNS]
    columns = {"messages": "dialog", "role": "who", "content": "what"}
    path = write(tmp_path / "a.jsonl", [{"dialog": said}])
    (found,) = read(path, columns=columns)
    assert [(m["role"], m["content"]) for m in found["messages"]] == TURNS
    path = write(tmp_path / "b.jsonl", [{"ask": "Add.", "x": "1 and 2", "y": "3"}])
    alpaca = {"instruction": "ask", "input": "x", "output": "y"}
    assert read(path, columns=alpaca)[0]["messages"][0]["content"] == "Add.\n1 and 2"


BAD = {
    "no assistant turn that counts": {"messages": messages(("user", "One?"))},
    "no assistant turn that counts, on": {"messages": [m | {"weight": 0} for m in TALK]},
    "with weight 0.5: give 0 or 1": {"messages": [TALK[1], TALK[2] | {"weight": 0.5}]},
    "not only text, such as an image": {"messages": [{"role": "user", "content": [{"image": 1}]}]},
    "a turn without a role: give messages": {"messages": [{"content": "x"}]},
    "content is no text": {"messages": [{"role": "user", "content": 3}]},
    "is no JSON object": [GOOD],
    "only text: give messages": {"text": "a"},
    "tools that are not JSON": {**GOOD, "tools": "{"},
}


def test_a_wrong_record_is_one_sentence_with_file_and_line(tmp_path: Path) -> None:
    chats.check_refused(tmp_path / "bad.jsonl", GOOD, BAD)


def counted_text(data: DataModule) -> list[str]:
    """The runs of tokens that count, decoded."""
    tokens, counted = data.corpus.tokens("train"), data.corpus.counted("train")
    edges = np.flatnonzero(np.diff(np.concatenate(([0], counted, [0]))))
    return [data.text_tokenizer.decode(tokens[a:b]) for a, b in edges.reshape(-1, 2)]


class Family(NamedTuple):
    """What a model of a family has to say for an answer, up to the token that ends it."""

    answer: str
    last: str = ""  # form of a conversation's last answer; default: `answer`
    system: bool = True  # the template has this role
    seq_len: int = 256
    only_served: str = ""  # at the end of the published prompt, and in no training


CHATML, FINAL = Family("{}<|im_end|>"), "<|channel|>final<|message|>{}"
FAMILIES = {  # by their templates
    **dict.fromkeys("qwen2_5 qwen3 qwen3_instruct_2507 qwen3_5_think chatml".split(), CHATML),
    "llama3_1": Family("{}<|eot_id|>", seq_len=640),
    "mistral": Family("{}</s>", system=False),
    "gemma": Family("{}<end_of_turn>", system=False),
    "gemma3": Family("{}<end_of_turn>"),
    "gemma4_v5": Family("{}<turn|>"),
    "glm4moe": Family("\n<think></think>\n{}<|user|>"),
    "phi3": Family("{}<|end|>\n", last="{}<|end|>\n<|endoftext|>"),
    "deepseekv3": Family("{}<｜end▁of▁sentence｜>", only_served="<think>\n"),
    "gptoss": Family(FINAL + "<|end|>", last=FINAL + "<|return|>", seq_len=640),
    "cohere2": Family("{}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", seq_len=2560),
}
# trl has copies of the published templates, with marks or without. Not of Mistral's, written here
# in the published format, nor of OLMo 2's, for which ChatML stands in.
WRITTEN = {
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "chatml": chats.UNTAGGED,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_answers_count_and_follow_a_served_prompt(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    turns = [("user", "{}: a ß?"), *TURNS[2:4], ("assistant", "日 ß.")]
    turns = [TURNS[0], *turns] if family.system else turns
    talks = [messages(*((role, text.format(i)) for role, text in turns)) for i in range(9)]
    records = [{"messages": talk} for talk in talks]
    of_family: Any = {"family": name, "seq_len": family.seq_len}
    data = prepared(tmp_path, records, WRITTEN.get(name), **of_family)
    answers = [family.answer.format("Uno."), (family.last or family.answer).format("日 ß.")]
    assert counted_text(data) == answers * len(talks)
    tokenizer: Any = data.text_tokenizer
    asked = [talk[: 1 + family.system] for talk in talks]
    served = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert all(each.endswith(family.only_served) for each in served)
    first = tokenizer.decode(data.corpus.tokens("train")[: data.corpus.starts("train")[1]])
    assert sum(first.startswith(each.removesuffix(family.only_served)) for each in served) == 1


ANSWERS = ["Uno.<|im_end|>", "Due, ok.<|im_end|>"]


def own_template(folder: Path, text: str) -> str:
    (folder / "own.jinja").write_text(text)
    return str(folder / "own.jinja")


def test_what_counts_is_all_answers_the_last_or_everything(tmp_path: Path) -> None:
    own = own_template(tmp_path, chats.TAGGED)
    assert counted_text(prepared(tmp_path, [GOOD], template=own)) == ANSWERS
    last = prepared(tmp_path, [GOOD], template=own, train_on="last")
    assert counted_text(last) == ANSWERS[1:]
    (all_of_it,) = counted_text(prepared(tmp_path, [GOOD], chats.UNTAGGED, train_on="all"))
    assert all_of_it.startswith("<|im_start|>system\nBe brief.")
    assert all_of_it.endswith(f"{ANSWERS[1]}\n")


def refused(folder: Path, records: list[Any], tokenizers: str | None = None, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        prepared(folder, records, tokenizers, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_messages_say_whether_they_count_and_roles_are_chosen(tmp_path: Path) -> None:
    own = own_template(tmp_path, chats.UNTAGGED)
    assert "is no file" in refused(tmp_path, [GOOD], template=own + "x")
    assert counted_text(prepared(tmp_path, [GOOD], template=own)) == ANSWERS
    system = ["Be brief.<|im_end|>"]
    cases: list[Any] = [
        (chats.UNTAGGED, 2, {"train": False}, ANSWERS[1:]),
        (chats.TAGGED, 2, {"weight": 0}, ANSWERS[1:]),
        (chats.UNTAGGED, 0, {"train": True}, system + ANSWERS),
    ]
    for number, (text, changed, flag, counted) in enumerate(cases):
        talk = [m | (flag if n == changed else {}) for n, m in enumerate(TALK)]
        data = prepared(tmp_path / str(number), [{"messages": talk}], text)
        assert counted_text(data) == counted, flag
    users = prepared(tmp_path, [{"messages": TALK[1:]}], chats.UNTAGGED, roles=["user"])
    assert counted_text(users) == ["One?<|im_end|>", "Two?<|im_end|>"]


def test_adjacent_answers_are_two_turns(tmp_path: Path) -> None:
    talk = [*TALK, *messages(("assistant", "And ok."))]
    for text in (chats.UNTAGGED, chats.TAGGED, WRITTEN["mistral"]):
        talk = talk if text != WRITTEN["mistral"] else talk[1:]
        family: Any = {"family": "mistral" if text == WRITTEN["mistral"] else "qwen3"}
        data = prepared(tmp_path, [{"messages": talk}], text, train_on="last", **family)
        assert [each[:7] for each in counted_text(data)] == ["And ok."], text


def test_the_last_turn_of_a_template_that_rewrites_earlier_ones_counts(tmp_path: Path) -> None:
    data = prepared(tmp_path, [GOOD], train_on="last")
    assert counted_text(data) == ANSWERS[1:]
    text = data.text_tokenizer.decode(data.corpus.tokens("train"))
    assert text == data.text_tokenizer.apply_chat_template(TALK, tokenize=False)


def test_an_empty_mask_is_refused_with_template_and_line(tmp_path: Path) -> None:
    marks_uno = chats.TAGGED.replace("m.role == 'assistant'", "m.content == 'Uno.'")
    own = own_template(tmp_path, marks_uno)
    records = [GOOD, {"messages": messages(("user", "a"), ("assistant", "b"))}]
    message = refused(tmp_path, records, template=own)
    assert message.startswith(f"{own} marks no token of {tmp_path}/a.jsonl:2: ")


ENDS = "{{ m.content }}<|im_end|>{% else %}"
CHANGES = {
    "an answer without an end": (ENDS, "{{ m.content }}{% else %}"),
    "another prompt": ("prompt %}<|im_start|>", "prompt %}<start>"),
    "another last turn": ("<|im_end|>{% else", "{% if loop.last %}x{% endif %}<|im_end|>{% else"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_answers_that_cannot_be_told_from_a_prompt_are_refused(what: str, tmp_path: Path) -> None:
    assert CHANGES[what][0] in chats.UNTAGGED
    said = refused(tmp_path, [GOOD], chats.UNTAGGED.replace(*CHANGES[what]))
    assert "a.jsonl:1" in said and "give data.source.template" in said
    assert "message 3 does not continue a server's prompt, changes when others follow, or" in said


def test_an_answer_that_the_tokenizer_joins_with_its_prompt_is_refused(tmp_path: Path) -> None:
    talk = messages(("user", "a"), ("assistant", "\n\nb"))
    said = refused(tmp_path, [{"messages": talk}], chats.UNTAGGED, merges=[("Ċ", "Ċ")])
    assert "joins the end of a prompt with the start of message 2" in said


def test_rows_hold_whole_conversations_that_do_not_attend_to_each_other(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 40)
    talks = [messages(("user", f"{i}?"), ("assistant", "ab" * n)) for i, n in enumerate(lengths)]
    data = prepared(tmp_path, [{"messages": talk} for talk in talks], chats.TAGGED)
    rows, corpus = data.rows_of("train"), data.corpus
    batch = rows.__getitems__(list(range(len(rows))))
    tokens, counted, starts = (of("train") for of in (corpus.tokens, corpus.counted, corpus.starts))
    documents = {
        tuple(tokens[a : b - 1].tolist()): counted[a + 1 : b].copy()
        for a, b in zip(starts, starts[1:], strict=False)
    }
    inputs, labels = batch["input_ids"].flatten(), batch["labels"].flatten()
    bounds, found = batch[BOUNDS].tolist(), 0
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
    data = prepared(tmp_path, records, chats.TAGGED)
    lines: list[str] = []
    data.prepare(report=lines.append)
    packing = data.rows_of("train").packing
    assert (packing.num_cut, packing.num_dropped, len(packing.documents)) == (1, 1, 4)
    assert "longer than a row: 1 cut, 1 without an answer dropped" in "\n".join(lines)
    for kind in ("starts", "counted"):
        path = data.corpus.folder / f"train.{kind}"
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1, *content[1:]]))
        with pytest.raises(InputError, match=f"train.{kind} has another checksum"):
            data.require()
        path.write_bytes(content)
