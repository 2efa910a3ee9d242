"""Conversations under fifteen templates: the answers count, and a served prompt precedes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from trainer_dev.data import DataModule

from dist_template.text import Chat, Pretrained
from tests.support import chats
from tests.support.runs import quiet

TURNS = [("user", "{}: a cat?"), ("assistant", "Aye aye, captain."), ("user", "A dog?")]
TURNS += [("assistant", "Nay, sir.")]


class Family(NamedTuple):
    """What a family's template makes of an answer: all of it counts, with the end of the turn."""

    answer: str
    last: str = ""  # form of a conversation's last answer; default: `answer`
    system: bool = True  # the template has this role
    seq_len: int = 256
    only_served: str = ""  # at the end of the published prompt, and in no training


THINKS = "<think>\n\n</think>\n\n{}<|im_end|>\n"
FINAL = "<|start|>assistant<|channel|>final<|message|>{}"
DEEPSEEK = "<｜Assistant｜>{}<｜end▁of▁sentence｜>"
FAMILIES = {  # by their templates
    "llama3_1": Family("{}<|eot_id|>", seq_len=640),
    "qwen2_5": Family("\n{}<|im_end|>\n"),
    "qwen3": Family(THINKS),
    "qwen3_instruct_2507": Family("{}<|im_end|>\n"),
    "qwen3_5_think": Family(THINKS),
    "mistral": Family("{}</s>", system=False),
    "gemma": Family("{}<end_of_turn>\n", system=False),
    "gemma3": Family("{}<end_of_turn>\n"),
    "gemma4_v5": Family("{}<turn|>\n"),
    "phi3": Family("{}<|end|>\n", last="{}<|end|>\n<|endoftext|>"),
    "deepseekv3": Family(DEEPSEEK, only_served="<think>\n"),
    "gptoss": Family(FINAL + "<|end|>", last=FINAL + "<|return|>", seq_len=640),
    "glm4moe": Family("\n<think></think>\n{}<|user|>"),
    "cohere2": Family("{}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", seq_len=2560),
    "chatml": Family("{}<|im_end|>\n"),
}
# trl has copies of the published templates, with marks or without. Not of Mistral's, written here
# in the published format, nor of OLMo 2's, for which ChatML stands in.
WRITTEN = {
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "chatml": chats.UNTAGGED,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_answers_of_a_family_count_and_follow_a_served_prompt(
    name: str, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    turns = [*([("system", "Be brief.")] if family.system else []), *TURNS]
    talks = [chats.messages(*((role, text.format(i)) for role, text in turns)) for i in range(9)]
    path = chats.write(tmp_path / "chats.jsonl", [{"messages": talk} for talk in talks])
    folder = chats.tokenizer(tmp_path / "tokenizer", name, WRITTEN.get(name))
    options: Any = {
        "validation_share": 0.0,
        "test_share": 0.0,
        "cache_dir": str(tmp_path / "cache"),
    }
    source, tokens_of = Chat([str(path)]), Pretrained(str(folder))
    data = DataModule(source, tokens_of, family.seq_len, 1, 1, **options)
    data.prepare(report=quiet)
    tokenizer: Any = data.text_tokenizer
    corpus = data.corpus
    tokens, counted, starts = (
        read("train") for read in (corpus.tokens, corpus.counted, corpus.starts)
    )
    edges = np.flatnonzero(np.diff(np.concatenate(([0], counted, [0])))).reshape(-1, 2)
    answers = [
        family.answer.format(TURNS[1][1]),
        (family.last or family.answer).format(TURNS[3][1]),
    ]
    assert [tokenizer.decode(tokens[a:b]) for a, b in edges] == answers * (len(starts) - 1)
    asked = [talk[: 1 + family.system] for talk in talks]
    served = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert all(each.endswith(family.only_served) for each in served)
    first = tokenizer.decode(tokens[: starts[1]])
    assert sum(first.startswith(each.removesuffix(family.only_served)) for each in served) == 1
