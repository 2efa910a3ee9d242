"""The table of chat templates x records: is all of a record in the tokens, or is it refused?

    python -m tests.support.templates FOLDER [--template NAME] [--record NAME] [--markdown FILE]

FOLDER has .jinja files. What has to be in the tokens is typed by hand for each record, so that the
library's own check is not its own judge. A cell is `right`, `refused` with a reason, or `WRONG`."""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dist_template import InputError
from dist_template.text import Bytes, Chat

TOOL = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Its name."}},
        "required": ["city"],
    },
}
CLOCK = {
    "name": "get_clock",
    "description": "Time of a zone.",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": TOOL}]
TWO_TOOLS = [*TOOLS, {"type": "function", "function": CLOCK}]


@dataclass(frozen=True)
class Case:
    """A record, and what is in its tokens, or is not."""

    record: dict[str, Any]
    trained: tuple[str, ...]
    whole: tuple[str, ...] = ()
    not_trained: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()  # of those that count
    nowhere: tuple[str, ...] = ()
    parquet: bool = False
    must_work: bool = False  # a refusal is wrong


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | more


def call(name: str, arguments: Any, number: int = 1) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def result(text: str, number: int = 1, name: str = "get_weather") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": name, "content": text}


ASKED, CALLED = user("Is it raining there?"), call("get_weather", {"city": "Rome"})
TEXT_CALLED = call("get_weather", '{"city": "Rome"}')
DONE = [result("22 degrees"), answer("It is sunny.")]
TOOL_WORDS = ("raining there", "get_weather", "city", "22 degrees")
CALL_WORDS = ("get_weather", "city", "Rome", "It is sunny.")
TWICE = ('\\"city', "'city'")

# Forms of public data sets, in small.
PUBLISHED = {
    "plain": Case(
        {"messages": [user("Name a bird."), answer("A kestrel.")]},
        ("A kestrel.",),
        ("Name a bird.",),
        ("Name a bird.",),
        must_work=True,
    ),
    "system, two questions": Case(
        {
            "messages": [
                {"role": "system", "content": "Answer tersely."},
                *(user("Name a bird."), answer("A kestrel.")),
                *(user("And a fish?"), answer("A pike.")),
            ]
        },
        ("A kestrel.", "A pike."),
        ("Answer tersely.", "Name a bird.", "And a fish?"),
        ("Answer tersely.", "And a fish?"),
    ),
    "ShareGPT, system beside": Case(
        {
            "conversations": [
                {"from": "human", "value": "Who goes there?"},
                {"from": "gpt", "value": "A sailor."},
            ],
            "system": "Answer like a pirate.",
        },
        ("A sailor.",),
        ("Answer like a pirate.", "Who goes there?"),
        ("pirate",),
    ),
    "ShareGPT, function_call": Case(
        {
            "conversations": [
                {"from": "human", "value": "Is it raining there?"},
                {
                    "from": "function_call",
                    "value": '{"name": "get_weather", "arguments": {"city": "Rome"}}',
                },
                {"from": "observation", "value": "22 degrees"},
                {"from": "gpt", "value": "It is sunny."},
            ],
            "tools": json.dumps([TOOL]),
        },
        CALL_WORDS,
        TOOL_WORDS,
        ("22 degrees",),
        TWICE,
    ),
    "OpenAI, a call alone": Case(
        {"messages": [ASKED, answer(None, tool_calls=[TEXT_CALLED]), *DONE], "tools": TOOLS},
        CALL_WORDS,
        TOOL_WORDS,
        ("22 degrees",),
        TWICE,
    ),
    "reasoning_content": Case(
        {"messages": [user("Two and two?"), answer("Four.", reasoning_content="Adding them up.")]},
        ("Four.", "Adding them up."),
        ("Two and two?",),
    ),
    "<think> in the content": Case(
        {"messages": [user("Two and two?"), answer("<think>\nAdding them up.\n</think>\n\nFour.")]},
        ("Four.", "Adding them up."),
        ("Two and two?",),
    ),
    "tools, no call": Case(
        {"messages": [user("Name a bird."), answer("A kestrel.")], "tools": TWO_TOOLS},
        ("A kestrel.",),
        ("Name a bird.", "get_weather", "city", "get_clock", "zone"),
    ),
    "a developer turn": Case(
        {
            "messages": [
                {"role": "developer", "content": "Answer tersely."},
                *(user("Name a bird."), answer("A kestrel.")),
            ]
        },
        ("A kestrel.",),
        ("Answer tersely.", "Name a bird."),
    ),
    "a later system turn": Case(
        {
            "messages": [
                *(user("Name a bird."), answer("A kestrel.")),
                {"role": "system", "content": "Now in French."},
                *(user("And a fish?"), answer("Un brochet.")),
            ]
        },
        ("A kestrel.", "Un brochet."),
        ("Now in French.",),
        ("Now in French.",),
    ),
    "text beside a call": Case(
        {
            "messages": [ASKED, answer("Let me look outside.", tool_calls=[CALLED]), *DONE],
            "tools": TOOLS,
        },
        (*CALL_WORDS, "Let me look outside."),
        TOOL_WORDS,
        ("22 degrees",),
        TWICE,
    ),
    "arguments with quotes": Case(
        {
            "messages": [
                ASKED,
                answer(
                    "",
                    tool_calls=[
                        call("get_weather", json.dumps({"city": 'São "Paulo"', "days": 3}))
                    ],
                ),
                *DONE,
            ]
        },
        ("get_weather", "city", "São", "Paulo", "days", "3"),
        ("22 degrees",),
        absent=TWICE,
    ),
    "two tools in Parquet": Case(
        {
            "messages": [
                ASKED,
                answer(
                    None,
                    tool_calls=[
                        {
                            "function": {
                                "name": "get_weather",
                                "arguments": {"city": "Rome", "zone": None},
                            },
                            "id": "call00001",
                            "type": "function",
                        }
                    ],
                ),
                *DONE,
            ],
            "tools": TWO_TOOLS,
        },
        CALL_WORDS,
        ("22 degrees", "get_clock"),
        absent=TWICE,
        nowhere=('"zone": null', '"zone":null', "zone=None", '"city": null', '"city":null'),
        parquet=True,
    ),
    "loss: false": Case(
        {
            "messages": [
                *(user("Name a bird."), answer("A kestrel.", loss=False)),
                *(user("And a fish?"), answer("A pike.", loss=True)),
            ]
        },
        ("A pike.",),
        ("A kestrel.",),
        ("A kestrel.",),
    ),
    "weight: 0": Case(
        {
            "messages": [
                *(user("Name a bird."), answer("A kestrel.", weight=0)),
                *(user("And a fish?"), answer("A pike.", weight=1)),
            ]
        },
        ("A pike.",),
        ("A kestrel.",),
        ("A kestrel.",),
    ),
    "Alpaca with history": Case(
        {
            "system": "Answer tersely.",
            "instruction": "And a fish?",
            "input": "From a lake.",
            "output": "A pike.",
            "history": [["Name a bird.", "A kestrel."]],
        },
        ("A kestrel.", "A pike."),
        ("Answer tersely.", "From a lake.", "Name a bird."),
        ("From a lake.", "tersely"),
    ),
}

# What an attacker would try.
ATTACKS = {
    "two calls in a turn": Case(
        {
            "messages": [
                ASKED,
                answer(None, tool_calls=[CALLED, call("get_clock", {"zone": "Europe/Rome"}, 2)]),
                *(result("22 degrees"), result("noon", 2, "get_clock"), answer("It is sunny.")),
            ],
            "tools": TWO_TOOLS,
        },
        (*CALL_WORDS, "get_clock", "zone", "Europe/Rome"),
        ("22 degrees", "noon"),
        ("noon",),
    ),
    "a call without arguments": Case(
        {"messages": [user("Refresh."), answer(None, tool_calls=[call("do_refresh", "{}")])]},
        ("do_refresh",),
        ("Refresh.",),
    ),
    "functions and function_call": Case(
        {
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
                },
                {"role": "function", "name": "get_weather", "content": "22 degrees"},
                answer("It is sunny."),
            ],
            "functions": [TOOL],
        },
        CALL_WORDS,
        TOOL_WORDS,
        ("22 degrees",),
        TWICE,
    ),
    "parts with value": Case(
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": "Name a bird."}]},
                {"role": "Assistant", "content": [{"type": "text", "text": "A kestrel."}]},
            ]
        },
        ("A kestrel.",),
        ("Name a bird.",),
        ("Name a bird.",),
        must_work=True,
    ),
    "texts of a letter": Case(
        {"messages": [{"role": "system", "content": "Z"}, *(user("Q"), answer("J"))]},
        ("J",),
        ("Z", "Q"),
    ),
    "reasoning of an earlier turn": Case(
        {
            "messages": [
                user("Two and two?"),
                answer("<think>\nAdding them up.\n</think>\n\nFour.", train=False),
                *(user("And a fish?"), answer("A pike.")),
            ]
        },
        ("A pike.",),
        ("Two and two?", "Four."),
        ("Four.", "Adding"),
    ),
    "reasoning of each turn": Case(
        {
            "messages": [
                *(user("Two and two?"), answer("Four.", reasoning="Adding them up.")),
                *(user("Times three?"), answer("Twelve.", reasoning="Now I multiply.")),
            ]
        },
        ("Four.", "Adding them up.", "Twelve.", "Now I multiply."),
    ),
    "reasoning before a call": Case(
        {
            "messages": [
                ASKED,
                answer("", reasoning_content="A tool is needed.", tool_calls=[CALLED]),
                *DONE,
            ],
            "tools": TOOLS,
        },
        (*CALL_WORDS, "A tool is needed."),
        TOOL_WORDS,
        absent=TWICE,
    ),
    "a result that is JSON": Case(
        {
            "messages": [
                ASKED,
                answer("", tool_calls=[CALLED]),
                *(result('{"degrees": 22, "sky": "a \\"clear\\" one"}'), answer("It is sunny.")),
            ],
            "tools": TOOLS,
        },
        CALL_WORDS,
        ("degrees", "22", "sky", "clear"),
        ("degrees",),
    ),
    "nested arguments": Case(
        {
            "messages": [
                ASKED,
                answer(
                    None,
                    tool_calls=[
                        call(
                            "plan_trip",
                            {"stops": [{"place": "Rome"}, {"place": "Pisa"}], "nights": 41},
                        )
                    ],
                ),
            ]
        },
        ("plan_trip", "stops", "Rome", "Pisa", "nights", "41"),
        absent=('\\"place', "'nights'"),
    ),
}
CASES = PUBLISHED | ATTACKS


class Cell(NamedTuple):
    template: str
    record: str
    verdict: str  # right, refused or WRONG
    why: str = ""


def tokenizer_for(template: str) -> Any:
    """A tokenizer of bytes that has the tokens that a template writes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    found = set(re.findall(r"<[|｜][^<>'\"{}\s]{1,40}[|｜]?>|\[/?[A-Z_]{2,30}\]", template))
    found |= set(re.findall(r"</?[a-z_]{3,20}[|]?>|<[｜|]?[A-Z]{3}[｜|]?>", template)) - {"<think>"}
    others = sorted(found) or ["<extra>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        bos_token="<s>",
        extra_special_tokens=others,
        chat_template=template,
    )


def plain(text: str) -> str:
    """A text without escapes of JSON."""
    text = re.sub(r"\\u([0-9a-f]{4})", lambda found: chr(int(found[1], 16)), text)
    return text.replace('\\"', '"').replace("\\n", "\n")


def divides(tokenizer: Any, messages: list[Any]) -> bool:
    """Whether an answer follows the prompt of a server, and something ends it."""
    options: Any = {"tokenize": False, "tools": [], "enable_thinking": False}
    try:
        asked = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, **options)
        told = tokenizer.apply_chat_template(messages, **options)
    except Exception:  # a template raises errors of Jinja and of Python
        return False
    return told.startswith(asked) and not told.rstrip().endswith(messages[1]["content"])


def judged(case: Case, tokenizer: Any, source: Chat, document: tuple[str, str]) -> tuple[str, str]:
    """The verdict on a record under a template, and why."""
    try:
        (encoded,) = source.encode(Bytes(), tokenizer, [document])
    except InputError as error:
        is_wrong = case.must_work and divides(tokenizer, json.loads(document[1])["messages"])
        return ("WRONG" if is_wrong else "refused"), str(error)
    ids, counted = encoded.ids, encoded.counted
    whole, trained = tokenizer.decode(ids), tokenizer.decode(ids[counted])
    faults = [f"not trained: {text}" for text in case.trained if text not in plain(trained)]
    faults += [f"not in the tokens: {text}" for text in case.whole if text not in plain(whole)]
    faults += [f"trained: {text}" for text in case.not_trained if text in trained]
    faults += [f"in the tokens: {text}" for text in case.absent if text in trained]
    faults += [f"in the tokens: {text}" for text in case.nowhere if text in whole]
    return ("WRONG", "; ".join(faults) + f" in {trained!r}") if faults else ("right", "")


def source_of(case: Case, folder: Any) -> tuple[Chat, tuple[str, str]]:
    """A source that reads a case's record from a file in `folder`, and its document."""
    path = Path(folder, "a.parquet" if case.parquet else "a.jsonl")
    if case.parquet:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist([case.record]), path)
    else:
        path.write_text(json.dumps(case.record) + "\n")
    source = Chat([str(path)])
    (document,) = source.documents()
    return source, document


def table(templates: Iterable[Path], cases: dict[str, Case]) -> Iterator[Cell]:
    """The cells of templates x records."""
    with tempfile.TemporaryDirectory() as folder:
        documents = {}
        for number, (name, case) in enumerate(cases.items()):
            inside = Path(folder, str(number))
            inside.mkdir()
            documents[name] = source_of(case, inside)
        for path in templates:
            text = path.read_text(encoding="utf-8")
            if "messages" not in text:
                continue  # it is another kind of template
            tokenizer = tokenizer_for(text)
            for name, case in cases.items():
                yield Cell(path.stem, name, *judged(case, tokenizer, *documents[name]))


def reason(why: str) -> str:
    """The reason of a refusal, without names and numbers."""
    for words, short in REASONS.items():
        if words in why:
            return short
    return why[-80:]


REASONS = {
    "the reasoning of message": "reasoning is not written",
    "the call ": "a tool call is not written",
    "an argument": "arguments are not written",
    "the tool ": "a tool is not written",
    "the parameter": "a tool is not written",
    "(system)": "a system turn is not written",
    "(developer)": "a developer turn is not written",
    "(tool)": "a tool's result is not written",
    "the text of message": "a turn's text is not written",
    "does not continue a server's prompt": "earlier turns change, or have no end",
    "cannot be rendered": "the template raises an error",
    "marks no token": "marks no token",
    "does not exist": "the template raises an error",
}


def markdown(cells: list[Cell]) -> str:
    """A row of each record: the templates that are right, and the reasons of the others."""
    lines = ["| record | right | refused, by reason |", "|---|---|---|"]
    for name in dict.fromkeys(cell.record for cell in cells):
        row = [cell for cell in cells if cell.record == name]
        right = sum(cell.verdict == "right" for cell in row)
        why = Counter(reason(cell.why) for cell in row if cell.verdict != "right")
        reasons = ", ".join(f"{number} {text}" for text, number in why.most_common())
        lines.append(f"| {name} | {right} | {reasons} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.templates")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--template", default="", help="only templates whose names contain this")
    parser.add_argument("--record", default="", help="only records whose names contain this")
    parser.add_argument("--markdown", type=Path, help="write the table of records to this file")
    parser.add_argument("--verbose", action="store_true", help="print refusals too")
    given = parser.parse_args(argv)
    paths = [path for path in sorted(given.folder.glob("*.jinja")) if given.template in path.name]
    cases = {name: case for name, case in CASES.items() if given.record in name}
    cells = []
    for cell in table(paths, cases):
        cells.append(cell)
        if cell.verdict == "WRONG" or given.verbose:
            print(*cell, sep=" | ", flush=True)
    print(Counter(cell.verdict for cell in cells), f"of {len(paths)} templates")
    print(markdown(cells))
    if given.markdown:
        given.markdown.write_text(markdown(cells), encoding="utf-8")
    return int(any(cell.verdict == "WRONG" for cell in cells))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
