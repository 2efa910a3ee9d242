"""Records as other tools write them: each key is read, or refused with a way out."""

import json
from pathlib import Path
from typing import Any

import pytest

from dist_template import InputError
from dist_template.text import Mixture, Preferences, Pretrained, Ratings
from dist_template.text.sources.notes import describe
from tests.support import chats
from tests.support.chats import UNTAGGED, messages, prepared, read, write
from tests.support.runs import quiet

ASKED, TOLD = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
PAIR = [ASKED, TOLD]
SYSTEM = {"role": "system", "content": "Answer like a pirate."}
ARGUMENTS = {"city": "Rome"}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL = {"name": "get_weather", "parameters": {"properties": {"city": {"type": "string"}}}}


def said(role: str, text: Any) -> dict[str, Any]:
    return {"from": role, "value": text}


def call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


# A record, and its document.
READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "system beside ShareGPT": (
        {"conversations": [said("human", "Hi"), said("gpt", "Yo")]} | {"system": SYSTEM["content"]},
        {"messages": [SYSTEM, *PAIR]},
    ),
    "system beside a prompt": (
        {"prompt": "Hi", "completion": "Yo", "system": SYSTEM["content"]},
        {"messages": [SYSTEM, *PAIR]},
    ),
    "the same system twice": (
        {"messages": [SYSTEM, *PAIR], "system": SYSTEM["content"]},
        {"messages": [SYSTEM, *PAIR]},
    ),
    "function_call and observation": (
        {
            "conversations": [
                said("human", "Hi"),
                said("function_call", json.dumps({"name": "get_weather", "arguments": ARGUMENTS})),
                said("observation", "22"),
                said("gpt", "Yo"),
            ],
            "tools": json.dumps([TOOL]),
        },
        {"messages": [ASKED, CALLED, {"role": "tool", "content": "22"}, TOLD], "tools": [TOOL]},
    ),
    "two calls in a function_call, after reasoning": (
        {
            "conversations": [
                said("human", "Hi"),
                said(
                    "function_call",
                    "<think>two</think>"
                    + json.dumps([{"name": "get_weather", "arguments": ARGUMENTS}] * 2),
                ),
            ]
        },
        {"messages": [ASKED, CALLED | {"content": "<think>two</think>", "tool_calls": [CALL] * 2}]},
    ),
    "other names of roles": (
        {
            "conversations": [
                said("Human", "Hi"),
                said("chatgpt", "Yo"),
                said("tool_response", "22"),
                said("Assistant", "Yo"),
            ]
        },
        {"messages": [*PAIR, {"role": "tool", "content": "22"}, TOLD]},
    ),
    "arguments as JSON, a flat call, OpenAI's older form": (
        {
            "messages": [
                ASKED,
                call(name="get_weather", arguments=json.dumps(ARGUMENTS)),
                {"role": "assistant", "tool_calls": [{"name": "get_weather"} | {"arguments": {}}]},
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)},
                },
            ],
            "functions": [TOOL],
        },
        {
            "messages": [
                ASKED,
                CALLED,
                CALLED
                | {"tool_calls": [CALL | {"function": {"name": "get_weather", "arguments": {}}}]},
                CALLED,
            ],
            "tools": [{"type": "function", "function": TOOL}],
        },
    ),
    "no calls in a list": (
        {"messages": [ASKED, TOLD | {"tool_calls": [], "function_call": None}]},
        {"messages": PAIR},
    ),
    "an explicit null in an argument": (
        {"messages": [ASKED, call(name="get_weather", arguments={"city": None})]},
        {
            "messages": [
                ASKED,
                CALLED
                | {
                    "tool_calls": [
                        CALL | {"function": {"name": "get_weather", "arguments": {"city": None}}}
                    ]
                },
            ]
        },
    ),
    "parts with value": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": "H"}, {"text": "i"}]},
                TOLD,
            ]
        },
        {"messages": PAIR},
    ),
    "messages as JSON": ({"messages": json.dumps(PAIR)}, {"messages": PAIR}),
    **{
        f"{key}: {value}": (
            {"messages": [ASKED, TOLD | {key: value}, *PAIR]},
            {"messages": [ASKED, TOLD | {"train": False}, *PAIR]},
        )
        for key, value in (("loss", False), ("training", False), ("trainable", 0), ("weight", 0.0))
    },
    "keys without a meaning": ({"messages": PAIR, "id": 3, "score": 0.5}, {"messages": PAIR}),
    "empty keys of other tools": (
        {"messages": PAIR, "images": [], "rejected": None, "history": []},
        {"messages": PAIR},
    ),
}


@pytest.mark.parametrize("case", READ)
def test_a_published_form_is_read(case: str, tmp_path: Path) -> None:
    record, document = READ[case]
    assert read(write(tmp_path / "a.jsonl", [record])) == [document]


TALK = {"messages": PAIR}
REFUSED: dict[str, Any] = {
    "role 'narrator', which no server uses: give one of .*, or name its role in data.source.role": {
        "messages": [{"role": "narrator", "content": "Later."}, *PAIR]
    },
    "a system prompt beside its turns and another one among them": TALK
    | {"messages": [SYSTEM, *PAIR], "system": "Be brief."},
    "has images, which data.source Chat does not read in this place: it is no text,": TALK
    | {"images": ["a.png"]},
    "has rejected, which .* or add rejected to data.source.ignored": TALK | {"rejected": "No"},
    "has history, which": TALK | {"history": [["a", "b"]]},
    "has loss, which": TALK | {"loss": 0.5},
    "has reasoning_content, which": {"prompt": "Hi", "completion": "Yo"}
    | {"reasoning_content": "hm"},
    "has chat_template_kwargs, which": TALK | {"chat_template_kwargs": {"a": 1}},
    "has system_prompt, which .* another name in data.source.columns": TALK
    | {"system_prompt": "Be brief."},
    "a turn of 'assistant' with loss_mask, which": {"messages": [ASKED, TOLD | {"loss_mask": [0]}]},
    "a turn of 'assistant' with train_detail, which": {
        "messages": [ASKED, TOLD | {"train_detail": [{"begin_offset": 0}]}]
    },
    "a turn of 'user' with images, which": {"messages": [ASKED | {"images": ["a.png"]}, TOLD]},
    "with loss 0.3: give 0 or 1": {"messages": [ASKED, TOLD | {"loss": 0.3}]},
    "which contradict each other": {"messages": [ASKED, TOLD | {"loss": True, "weight": 0}]},
    "with content and value: remove one": {"messages": [ASKED | {"value": "x"}, TOLD]},
    "a tool call without a name": {"messages": [ASKED, call(arguments={})]},
    "whose arguments are no object": {"messages": [ASKED, call(name="f", arguments=[1])]},
    "has arguments of f that are not JSON": {"messages": [ASKED, call(name="f", arguments="{")]},
    "a function_call that are not JSON": {"conversations": [said("function_call", "get it")]},
    "turns that are a text and not JSON": {"messages": "Hi"},
    "has tools of which one is no object": TALK | {"tools": ["3"]},
    "not only text, such as an image": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "image": "x"}]}]
    },
}


def test_what_is_not_read_is_refused_with_a_way_out(tmp_path: Path) -> None:
    chats.check_refused(tmp_path / "bad.jsonl", TALK, REFUSED)


def test_the_ways_out_of_keys_and_roles_work(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [TALK | {"rejected": "No", "system_prompt": "Be brief."}])
    columns = {"system": "system_prompt"}
    (found,) = read(path, ignored=["rejected"], columns=columns)
    assert found["messages"] == [{"role": "system", "content": "Be brief."}, *PAIR]
    narrator = {"messages": [{"role": "narrator", "content": "Hi"}, TOLD]}
    path = write(tmp_path / "b.jsonl", [narrator])
    assert read(path, role_names={"narrator": "user"}) == [TALK]


def test_nulls_that_a_table_fills_in_are_no_values(tmp_path: Path) -> None:
    """Arrow gives all objects of a column the same keys; JSON's own null stays, see above."""
    import pyarrow
    from pyarrow import parquet

    both = [call(name="get_weather", arguments=ARGUMENTS), call(name="f", arguments={"zone": "x"})]
    tools = [TOOL, {"name": "f", "parameters": {"properties": {"zone": {"type": "string"}}}}]
    record = {"messages": [ASKED, *both], "tools": tools, "images": ["a.png"]}
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([record]), path)
    with pytest.raises(InputError, match="has images, which"):
        read(path)
    (found,) = read(path, ignored=["images"])
    calls = [message["tool_calls"][0]["function"] for message in found["messages"][1:]]
    assert [each["arguments"] for each in calls] == [ARGUMENTS, {"zone": "x"}]
    assert found["tools"] == tools


# What the template of the smallest ChatML does not write.
LOST: dict[str, tuple[dict[str, Any], str]] = {
    "a call": ({"messages": [ASKED, CALLED]}, "the call get_weather in message 2"),
    "reasoning": (
        {"messages": [ASKED, TOLD | {"reasoning_content": "hm"}]},
        "the reasoning of message 2, which is trained on",
    ),
    "tools": (TALK | {"tools": [TOOL]}, "the tool get_weather"),
}


@pytest.mark.parametrize("case", LOST)
def test_what_a_template_does_not_write_is_refused_or_dropped(case: str, tmp_path: Path) -> None:
    record, lost = LOST[case]
    records = [TALK, record, TALK | {"id": 1}]
    with pytest.raises(InputError) as caught:
        prepared(tmp_path / "refused", records, UNTAGGED)
    sentence = str(caught.value)
    assert f"a.jsonl:2 of data.source says what the chat template of {tmp_path}" in sentence
    assert f"does not write: {lost}; give another template in data.source.template" in sentence
    assert "data.source.ignored" in sentence and "data.source.on_lost" in sentence
    data = prepared(tmp_path / "dropped", records, UNTAGGED, on_lost="drop")
    text = data.text_tokenizer.decode(data.corpus.tokens("train"))
    assert text.count("Yo<|im_end|>") == 2 and len(data.rows_of("train").packing.documents) == 2
    assert "1 records dropped (data.source.on_lost)" in data.corpus.describe()
    assert "a.jsonl:2" in data.corpus.describe() and "not read, and the" in data.corpus.describe()
    assert len(data.documents("train").texts) == 3, "the cache and the source still agree"


def test_a_text_that_a_template_cuts_out_is_found(tmp_path: Path) -> None:
    """The structure is the same; what the template does depends on the content."""
    cuts = UNTAGGED.replace(
        "{{ m.content }}<|im_end|>{% else", "{{ m.content.split('</think>')[-1] }}<|im_end|>{% else"
    )
    assert cuts != UNTAGGED
    thinks = {"messages": [ASKED, TOLD | {"content": "<think>hm</think>Yo"}]}
    with pytest.raises(InputError, match="does not write: the reasoning of message 2"):
        prepared(tmp_path, [TALK, thinks], cuts)
    cut = UNTAGGED.replace("{{ m.content }}<|im_end|>{% e", "{{ m.content[:9] }}<|im_end|>{% e")
    long = {"messages": [ASKED, TOLD | {"content": "A longer answer."}]}
    with pytest.raises(InputError, match=r"a.jsonl:2 .* the text of message 2 \(assistant\)"):
        prepared(tmp_path / "cut", [TALK, long], cut)


def test_a_call_that_tags_leave_out_is_refused(tmp_path: Path) -> None:
    """It is written, but not trained on."""
    calls = chats.TAGGED.replace(
        "{% generation %}", "{{ m.tool_calls | default([]) | tojson }}{% generation %}"
    )
    with pytest.raises(InputError, match="the call get_weather in message 2"):
        prepared(tmp_path, [TALK, {"messages": [ASKED, CALLED, *PAIR]}], calls)


def test_reasoning_of_a_turn_that_does_not_count_may_be_lost(tmp_path: Path) -> None:
    history = [ASKED, TOLD | {"reasoning_content": "hm", "train": False}]
    data = prepared(tmp_path, [{"messages": [*history, *PAIR]}], UNTAGGED)
    assert "hm" not in data.text_tokenizer.decode(data.corpus.tokens("train"))


PREFERRED = {"prompt": [ASKED], "chosen": [TOLD], "rejected": [TOLD | {"content": "No"}]}


@pytest.mark.parametrize("kind", [Preferences, Ratings])
def test_system_and_tools_beside_pairs_and_ratings_are_rendered(
    kind: type[Preferences], tmp_path: Path
) -> None:
    beside = {"system": SYSTEM["content"], "tools": [TOOL]}
    records: list[Any] = [PREFERRED | beside]
    if kind is Ratings:
        answers = [(PREFERRED[key], key == "chosen") for key in ("chosen", "rejected")]
        records = [
            {"prompt": [ASKED], "completion": answer, "label": label} | beside
            for answer, label in answers
        ]
    data = prepared(tmp_path, records, source=kind, family="qwen2_5", seq_len=2048)
    text = data.text_tokenizer.decode(data.corpus.tokens("train"))
    assert text.count("Answer like a pirate.") == text.count('"get_weather"') == 2 * len(records)
    with pytest.raises(InputError, match="does not write: the tool get_weather"):
        prepared(tmp_path / "lost", records, UNTAGGED, source=kind)
    if kind is Preferences:
        records.append(PREFERRED)
        dropped = prepared(tmp_path / "dropped", records, UNTAGGED, source=kind, on_lost="drop")
        assert len(dropped.rows_of("train").packing.documents) == 1


def test_a_pair_that_the_template_refuses_is_dropped(tmp_path: Path) -> None:
    records = [PREFERRED, PREFERRED | {"prompt": [SYSTEM, ASKED]}]
    with pytest.raises(InputError, match="a.jsonl:2 of data.source is refused by .* System role"):
        prepared(tmp_path, records, source=Preferences, family="gemma")
    data = prepared(tmp_path, records, source=Preferences, family="gemma", on_lost="drop")
    assert len(data.rows_of("train").packing.documents) == 1
    assert "refused by the template: System role not supported" in data.corpus.describe()


def test_system_beside_pairs_of_texts_is_refused(tmp_path: Path) -> None:
    texts = {"prompt": "Hi ", "chosen": "Yo", "rejected": "No"}
    path = write(tmp_path / "a.jsonl", [texts | {"system": "Be brief."}])
    with pytest.raises(InputError, match="has system beside a prompt that is a text"):
        read(path, Preferences)
    assert read(path, Preferences, ignored=["system"]) == [texts]


def test_pairs_of_llama_factory_are_read(tmp_path: Path) -> None:
    record = {
        "conversations": [said("human", "Hi")],
        "chosen": said("gpt", "Yo"),
        "rejected": said("gpt", "No"),
    }
    assert read(write(tmp_path / "a.jsonl", [record]), Preferences) == [PREFERRED]


def test_notes_of_a_source_name_kinds_with_an_example(tmp_path: Path) -> None:
    weighted = TOLD | {"loss": False}
    records = [TALK | {"id": 1}, {"messages": [SYSTEM, ASKED, weighted, *PAIR]}]
    data = prepared(tmp_path, records, UNTAGGED)
    lines = describe(data.corpus.manifest["notes"][""])
    assert [line.split()[-3:] for line in lines[1:3]] == [
        ["3", "a.jsonl:1", "Hi"],
        ["2", "a.jsonl:1", "Yo"],
    ]
    assert any("assistant, train false" in line for line in lines)
    assert lines[-1].endswith("id (1)")


def test_a_mixture_reports_each_of_its_sources(tmp_path: Path) -> None:
    from trainer_dev.data import DataModule

    sources: dict[str, Any] = {
        name: chats.Chat([str(write(tmp_path / f"{name}.jsonl", [TALK]))]) for name in "ab"
    }
    spec = Pretrained(str(chats.tokenizer(tmp_path / "tokenizer", "qwen3", UNTAGGED)))
    shares: Any = {"validation_share": 0.0, "test_share": 0.0}
    mixture = Mixture(sources, {"a": 1.0, "b": 1.0})
    data = DataModule(mixture, spec, 64, 1, 1, cache_dir=str(tmp_path / "cache"), **shares)
    lines: list[str] = []
    data.prepare(report=lines.append)
    assert "\n  a:\n" in "\n".join(lines) and "b.jsonl:1  Hi" in "\n".join(lines)


def test_a_source_of_a_mixture_without_a_row_is_refused(tmp_path: Path) -> None:
    """Its only conversation has no answer within a row, or is of another split."""
    from trainer_dev.data import DataModule

    late = {"messages": messages(("user", "Well? " * 30), ("assistant", "No."))}
    talks = {"a": [TALK], "b": [late]}
    sources = {
        name: chats.Chat([str(write(tmp_path / f"{name}.jsonl", given))])
        for name, given in talks.items()
    }
    spec = Pretrained(str(chats.tokenizer(tmp_path / "tokenizer", "qwen3", UNTAGGED)))
    shares: Any = {"validation_share": 0.0, "test_share": 0.0}
    mixture = Mixture(sources, {"a": 1.0, "b": 1.0})
    data = DataModule(mixture, spec, 64, 1, 1, cache_dir=str(tmp_path / "cache"), **shares)
    with pytest.raises(InputError, match="source 'b' of data.source has no row to train on"):
        data.prepare(report=quiet)


def test_plain_conversations_have_the_tokens_of_before(tmp_path: Path) -> None:
    """So that a run whose records lost nothing resumes: by the tokens, not by the folder's name."""
    talk = {"messages": messages(*chats.TURNS)}
    path = write(tmp_path / "a.jsonl", [talk])
    ((_, text),) = chats.Chat([str(path)]).documents()
    assert text == json.dumps(talk, ensure_ascii=False), "its hash assigns it to a split"


def test_what_nothing_reads_is_counted(tmp_path: Path) -> None:
    """Keys of a turn that the template does not name, and columns of a table."""
    import pyarrow
    from pyarrow import parquet

    named = [ASKED | {"name": "Alice"}, TOLD | {"timestamp": "noon"}]
    data = prepared(tmp_path, [{"messages": named, "id": 1}], UNTAGGED)
    unread = data.corpus.manifest["notes"][""]["unread"]
    assert unread == {"id": 1, "name of a turn": 1, "timestamp of a turn": 1}
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([TALK | {"topic": "birds"}] * 3), path)
    source = chats.Chat([str(path)])
    assert len([*source.documents()]) == 3
    notes: Any = source.notes()
    assert notes["unread"] == {"topic": 3}


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Hi", "completion": "Yo", "label": False},
        {"messages": [ASKED, TOLD | {"reasoning": ["hm"]}]},
    ],
)
def test_a_bad_answer_and_reasoning_that_is_no_text_are_refused(
    record: Any, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="has label, which|whose reasoning is no text"):
        read(write(tmp_path / "a.jsonl", [record]))


# Texts that templates strip, escape or have in their own words.
TEXTS = ["  a \n", "C:\\new\\table", "<b>&amp;</b>", "a\r\n\n\tb", 'a "b" it\'s', "😀 é 日本"]
TEXTS += [
    "/no_think of it",
    "\\u00e9",
    "zq0001x",
    '{"a": [1, "x\\n"]}',
    "None",
    "{{ x }} {% y %}",
    "\\",
]
TEXTS += ["<tool_response>z</tool_response>", "\u00a0nbsp\u00a0", "Hi", "a"]


@pytest.mark.parametrize("escape", ["tojson", "tojson(ensure_ascii=true)", "string | trim"])
def test_a_text_that_is_written_is_not_refused(escape: str, tmp_path: Path) -> None:
    """A false refusal is as bad as a loss."""
    template = UNTAGGED.replace(
        "{{ m.content }}",
        "{{ m.content | trim }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
        f"{{{{ c.function.arguments | {escape} }}}}{{% endfor %}}",
    )
    records = []
    for text in TEXTS:
        called = call(name="f", arguments={"a": text, "b": [text, 3]})
        records.append({"messages": [{"role": "user", "content": text}, called]})
        records.append({"messages": [ASKED, TOLD | {"content": text}]})
    data = prepared(tmp_path, records, template, seq_len=512)
    assert data.corpus.manifest["splits"]["train"]["documents"] == 2 * len(TEXTS)
