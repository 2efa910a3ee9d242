"""Sixteen families are tuned on conversations, exported, and generate as trained; each with its chat template."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch

from tests.support import chats
from tests.support.runs import CONFIGS, OURS, only_run, run
from tests.support.serving import ask, made
from tests.support.tiers import tiers
from tests.support.wings import load_trained
from zoo.models import variants

TURNS = [("user", "{}: a cat?"), ("assistant", "Aye aye, captain."), ("user", "A dog?"), ("assistant", "Nay, sir.")]
NEW = 16  # generated tokens: twice a sliding window


class Family(NamedTuple):
    """What a family's template makes of an answer: all of it counts, with the end of the turn."""

    template: str  # of chats.SPECIAL
    answer: str
    stop: str  # a stop token of the published generation_config.json, besides the tokenizer's EOS
    last: str = ""  # form of a conversation's last answer; default: `answer`
    system: bool = True  # the template has this role
    seq_len: int = 256
    only_served: str = ""  # at the end of the published prompt, and in no training


THINKS = "<think>\n\n</think>\n\n{}<|im_end|>\n"
FINAL = "<|start|>assistant<|channel|>final<|message|>{}"
FAMILIES = {
    "llama": Family("llama3_1", "{}<|eot_id|>", "<|eot_id|>", seq_len=640),
    "qwen2": Family("qwen2_5", "\n{}<|im_end|>\n", "<|endoftext|>"),
    "qwen3": Family("qwen3", THINKS, "<|endoftext|>"),
    "qwen3_moe": Family("qwen3_instruct_2507", "{}<|im_end|>\n", "<|endoftext|>"),
    "qwen3_5_text": Family("qwen3_5_think", THINKS, "<|endoftext|>"),
    "mistral": Family("mistral", "{}</s>", "</s>", system=False),
    "mixtral": Family("mistral", "{}</s>", "</s>", system=False),
    "gemma2": Family("gemma", "{}<end_of_turn>\n", "<end_of_turn>", system=False),
    "gemma3_text": Family("gemma3", "{}<end_of_turn>\n", "<end_of_turn>"),
    "gemma4_text": Family("gemma4_v5", "{}<turn|>\n", "<turn|>"),
    "phi3": Family("phi3", "{}<|end|>\n", "<|end|>", last="{}<|end|>\n<|endoftext|>"),
    "deepseek_v3": Family("deepseekv3", "<｜Assistant｜>{}<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
                          only_served="<think>\n"),
    "gpt_oss": Family("gptoss", FINAL + "<|end|>", "<|call|>", last=FINAL + "<|return|>", seq_len=640),
    "glm4_moe": Family("glm4moe", "\n<think></think>\n{}<|user|>", "<|user|>"),
    "cohere2": Family("cohere2", "{}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", seq_len=2560),
    "olmo2": Family("chatml", "{}<|im_end|>\n", "<|endoftext|>"),
}  # fmt: skip
# trl has copies of the published templates, with marks or without. Not of Mistral's, written here in the published
# format, nor of OLMo 2's, for which ChatML stands in.
WRITTEN = {
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "chatml": chats.UNTAGGED,
}


def published(folder: Path, kind: str) -> Any:
    """Writes a small model of the family with its tokenizer, as published weights are; returns the tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    family = FAMILIES[kind]
    written = WRITTEN.get(family.template)
    tokenizer: Any = AutoTokenizer.from_pretrained(chats.tokenizer(folder, family.template, written))
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(family.stop)]
    fields: dict[str, Any] = {"max_position_embeddings": family.seq_len, "initializer_range": 0.5}
    fields |= {"vocab_size": len(tokenizer), "bos_token_id": tokenizer.bos_token_id, "eos_token_id": stops[0]}
    fields |= {"vocab_size_per_layer_input": len(tokenizer)} if kind == "gemma4_text" else {}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**variants(kind)["default"] | fields))
    model.get_input_embeddings().weight.data.mul_(0.05)  # with the range above, greedy tokens differ from each other
    model.get_output_embeddings().weight.data[stops] = 0  # it says NEW tokens
    model.generation_config = GenerationConfig(do_sample=True, top_k=20, eos_token_id=[*dict.fromkeys(stops)])
    model.save_pretrained(folder)
    return tokenizer


def conversations(family: Family) -> list[list[dict[str, str]]]:
    turns = [*([("system", "Be brief.")] if family.system else []), *TURNS]
    return [chats.messages(*((role, text.format(i)) for role, text in turns)) for i in range(32)]


def flags(folder: Path, family: Family) -> list[str]:
    """Flags of a small training on the conversations of a family."""
    records = chats.write(folder / "chats.jsonl", [{"messages": turns} for turns in conversations(family)])
    chunk = "null" if family.template == "cohere2" else 4096  # scaled logits: no chunks
    return [
        f"--config={CONFIGS}/finetune.yaml", f"--data.source.paths=[{records}]", f"--model.pretrained={folder}",
        f"--data.tokenizer.path={folder}", f"--run.root={folder}/runs", f"--data.cache_dir={folder}/cache",
        "--run.report=false", f"--data.seq_len={family.seq_len}", "--data.global_batch_size=4",
        "--data.micro_batch_size=2", "--data.validation_share=0.3", "--data.test_share=0", "--data.prompts=[]",
        f"--model.sample_tokens={NEW}", f"--model.loss_chunk={chunk}", "--model.optim.learning_rate=0.0005",
        "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_steps=2", "--trainer.max_epochs=-1",
        "--trainer.logger=false", "--trainer.limit_val_batches=0",
    ]  # fmt: skip


def check_labels(data: Any, family: Family, tokenizer: Any) -> None:
    """What counts is the answers, and what precedes the first one is a served prompt."""
    tokens, counted, starts = (read("train") for read in (data.corpus.tokens, data.corpus.counted, data.corpus.starts))
    edges = np.flatnonzero(np.diff(np.concatenate(([0], counted, [0])))).reshape(-1, 2)
    answers = [family.answer.format(TURNS[1][1]), (family.last or family.answer).format(TURNS[3][1])]
    assert len(starts) > 16 and [tokenizer.decode(tokens[a:b]) for a, b in edges] == answers * (len(starts) - 1)
    asked = [turns[: 1 + family.system] for turns in conversations(family)]
    served = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert all(each.endswith(family.only_served) for each in served)
    first = tokenizer.decode(tokens[: starts[1]])
    assert sum(first.startswith(each.removesuffix(family.only_served)) for each in served) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiers(FAMILIES, daily=["llama", "gemma3_text", "qwen3_moe"]))
def test_a_family_is_tuned_exported_and_generates_as_trained(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    family, folder, out = FAMILIES[kind], tmp_path / "model", tmp_path / "out"
    tokenizer, load = published(folder, kind), cast(Any, AutoModelForCausalLM.from_pretrained)
    given = flags(folder, family)
    assert run("prepare", *given) == 0 and run("fit", *given) == 0
    trained = load_trained(str(only_run(folder, "finetune")), OURS)
    check_labels(trained.data, family, tokenizer)

    assert run("export", trained.path, f"--output={out}") == 0
    found: Any = AutoTokenizer.from_pretrained(out)
    assert found.chat_template == tokenizer.chat_template == (out / "chat_template.jinja").read_text()
    asked = conversations(family)[0]
    for turns, prompt in ((asked[: 1 + family.system], True), (asked[:-1], True), (asked, False)):
        own, its = (one.apply_chat_template(turns, add_generation_prompt=prompt) for one in (tokenizer, found))
        assert own["input_ids"] == its["input_ids"]
    stops = np.ravel(json.loads((out / "generation_config.json").read_text())["eos_token_id"]).tolist()
    assert set(tokenizer.convert_ids_to_tokens(stops)) == {tokenizer.eos_token, family.stop}

    exported, loading = load(out, output_loading_info=True)
    assert not any(loading.values()), loading
    text = tokenizer.apply_chat_template(asked[: 1 + family.system], tokenize=False, add_generation_prompt=True)
    prompt = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    with torch.no_grad():
        models = (exported, trained.model, load(folder))
        logits, end, start = (model.eval()(prompt, use_cache=False).logits for model in models)
    assert torch.equal(logits, end) and not torch.equal(logits, start), "the trained model's logits"

    monkeypatch.setattr(type(trained.module), "data", trained.data)  # it has no Trainer
    tokens = trained.module.generate(prompt)
    said = tokens[0, prompt.shape[1] :]
    assert len(said) == NEW and len(set(said.tolist())) > 3, "an answer of one token repeated shows little"
    for cache in (True, False):
        generated = exported.generate(prompt, use_cache=cache, do_sample=False, max_new_tokens=NEW)
        assert torch.equal(generated, tokens), f"use_cache {cache}"
    app, greedy = made(out), {"temperature": 0, "max_tokens": NEW}
    bodies = {"completions": {"prompt": text}, "chat/completions": {"messages": asked[: 1 + family.system]}}
    plain, chat = (json.loads(asyncio.run(ask(app, f"/v1/{at}", bodies[at] | greedy))[1]) for at in bodies)
    assert plain["choices"][0]["text"] == tokenizer.decode(said, skip_special_tokens=True)
    assert plain["usage"]["total_tokens"] == chat["usage"]["total_tokens"] == tokens.shape[1]
