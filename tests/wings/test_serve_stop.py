"""An answer ends at a stop string, as transformers' own criterion ends it, at no cost by the vocabulary's size."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_template.wings.ship.serve.app import RequestEnd
from tests.support.serving import ask, chat_model, made

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("models") / "tiny")


STOPS = [["the"], ["e t", "zz"], ["é"], ["日本", "🙂 x"], ["<|im_end|>"], ["n ", "\n"], ["a" * 64], ["🙂"]]


def of_kind(kind: str, folder: Path) -> Any:
    """A tokenizer of bytes, as GPT-2's, or one whose words begin with an underline, as Llama-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if kind == "bytes":
        return AutoTokenizer.from_pretrained(folder)
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=60, initial_alphabet=list("abcdefghinotx"), show_progress=False)
    learner.train_from_iterator(["the tent is in the theatre, and then there"] * 3, trainer)
    learned = json.loads(learner.to_str())["model"]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    vocabulary, merges = {name: number for number, name in enumerate(names)}, [tuple(m) for m in learned["merges"]]
    made = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = learner.pre_tokenizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", unk_token="<unk>")


@pytest.mark.parametrize("kind", ["bytes", "underlines"])
@pytest.mark.parametrize("strings", STOPS)
def test_stop_strings_end_an_answer_where_transformers_criterion_does(
    folder: Path, strings: list[str], kind: str
) -> None:
    from transformers import StopStringCriteria

    tokenizer = of_kind(kind, folder)
    made_up = torch.Generator().manual_seed(7)
    texts = ["in the tent 日本語 é🙂 x\n", "aaa" * 40 + "<|im_end|>b", "no such thing", "🙂" * 9 + " theta"]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    least = 257 if kind == "underlines" else 0  # of bytes that are no text it shows others
    rows += [torch.randint(least, len(tokenizer), (60,), generator=made_up).tolist() for _ in range(20)]
    for row in rows:
        theirs, ours = StopStringCriteria(tokenizer, strings), RequestEnd(tokenizer)
        ours.strings, tokens = strings, torch.tensor([[tokenizer.eos_token_id, *row]])
        ends = [[bool(each(tokens[:, :n], None)) for n in range(2, len(row) + 2)] for each in (theirs, ours)]
        first = [found.index(True) if True in found else -1 for found in ends]
        assert first[0] == first[1], (tokenizer.decode(row), first)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_at_a_stop_string_without_tables_of_the_vocabulary(
    folder: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation import stopping_criteria

    monkeypatch.delattr(stopping_criteria.StopStringCriteria, "__init__")
    app, asked = made(folder), {"prompt": "a", "max_tokens": 40, "temperature": 0}

    async def both() -> list[str]:
        await app.warm_up()
        full = json.loads((await ask(app, TEXT, asked))[1])["choices"][0]["text"]
        _, body = await ask(app, TEXT, asked | {"stop": [full[9:12]], "stream": stream})
        events = [
            json.loads(line) for line in body.decode().replace("data: [DONE]", "").split("data: ") if line.strip()
        ]
        return [full, "".join(choice["text"] for event in events for choice in event["choices"])]

    full, short = asyncio.run(both())
    assert full.startswith(short) and full[9:12] in short and len(short) < len(full)
