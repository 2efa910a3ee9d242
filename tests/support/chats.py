"""Conversations for tests, and tokenizers with the chat templates of published families."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trl
from trainer_dev.data import DataModule

from dist_template import InputError
from dist_template.text import Chat, Pretrained
from tests.support.runs import quiet

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
CHATML = ("<|im_end|>", ["<|endoftext|>", "<|im_start|>"])
LLAMA = ("<|eot_id|>", ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"])
GEMMA = ("<eos>", ["<bos>", "<start_of_turn>", "<end_of_turn>"])
COHERE = """<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|>
    <|START_RESPONSE|> <|END_RESPONSE|>""".split()
SPECIAL = {  # family -> (EOS, other special tokens)
    "qwen3": ("<|im_end|>", ["<|im_start|>", "<|endoftext|>"]),
    "base": ("<|endoftext|>", ["<|pad|>"]),  # a model that has seen no conversation
    **dict.fromkeys(["llama3", "llama3_1"], LLAMA),
    "gemma4_v5": ("<turn|>", ["<bos>", "<|turn>", "<|channel>", "<channel|>"]),
    "deepseekv3": (
        "<｜end▁of▁sentence｜>",
        ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
    ),
    **dict.fromkeys(["qwen2_5", "qwen3_instruct_2507", "chatml"], CHATML),
    **dict.fromkeys(["gemma", "gemma3"], GEMMA),
    "qwen3_5_think": ("<|im_end|>", ["<|endoftext|>", "<|im_start|>", "<think>", "</think>"]),
    "phi3": ("<|endoftext|>", ["<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]),
    "gptoss": (
        "<|return|>",
        "<|startoftext|> <|start|> <|channel|> <|message|> <|end|> <|call|>".split(),
    ),
    "glm4moe": (
        "<|endoftext|>",
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>".split(),
    ),
    "cohere2": ("<|END_OF_TURN_TOKEN|>", COHERE),
    "mistral": ("</s>", ["<s>", "[INST]", "[/INST]"]),
}
# The smallest template with tags.
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNTAGGED = TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "")

TURNS = [("system", "Be brief."), ("user", "One?"), ("assistant", "Uno.")]
TURNS += [("user", "Two?"), ("assistant", "Due, ok.")]


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def write(path: Path, records: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def published(family: str) -> str:
    """Returns a family's published template; trl has a copy of it."""
    return (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")


def tokenizer(
    folder: Path, family: str = "qwen3", template: str | None = None, merges: Any = ()
) -> Path:
    """Saves a tokenizer of bytes with a family's tokens; `merges`: pairs of bytes as one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    vocabulary |= {a + b: len(alphabet) + i for i, (a, b) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[*merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    eos, others = SPECIAL[family]
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, bos_token=others[0], extra_special_tokens=others
    )
    if family != "base":
        made.chat_template = template or published(family)
    made.save_pretrained(folder)
    return folder


def read(path: Path, source: type[Chat] = Chat, **options: Any) -> list[Any]:
    return [json.loads(text) for _, text in source([str(path)], **options).documents()]


def check_refused(path: Path, good: Any, bad: dict[str, Any], source: type[Chat] = Chat) -> None:
    """Each record of `bad`, after a good one, is refused in its sentence with file and line."""
    for sentence, record in bad.items():
        with pytest.raises(InputError, match=sentence) as caught:
            read(write(path, [good, record]), source)
        assert f"{path}:2" in str(caught.value) and "\n" not in str(caught.value)


def prepared(
    folder: Path,
    records: list[Any],
    tokenizers: str | None = None,
    *,
    source: type[Chat] = Chat,
    family: str = "qwen3",
    seq_len: int = 256,
    across: bool = False,
    merges: Any = (),
    **options: Any,
) -> DataModule:
    """Records by a family's tokenizer, with its template or another; `options` are the source's."""
    spec = Pretrained(str(tokenizer(folder / "tokenizer", family, tokenizers, merges)))
    read_from = source([str(write(folder / "a.jsonl", records))], **options)
    shares: Any = {"validation_share": 0.0, "test_share": 0.0, "cross_document_attention": across}
    data = DataModule(read_from, spec, seq_len, 1, 1, cache_dir=str(folder / "cache"), **shares)
    data.prepare(report=quiet)
    return data


SMALL_QWEN3: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def weights(folder: Path) -> Path:
    """Adds a small Qwen3 model for the tokenizer that `folder` has, as published weights are."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    stop = tokenizer.eos_token_id
    config = Qwen3Config(vocab_size=len(tokenizer), eos_token_id=stop, **SMALL_QWEN3)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    # published weights sample by default, and stop at more than one token
    model.generation_config = GenerationConfig(do_sample=True, top_k=20, eos_token_id=[stop, 0])
    model.save_pretrained(folder)
    return folder


def taught(path: Path) -> Path:
    """Conversations in which each answer has the same format."""
    words = ["cat", "dog", "owl", "fox", "hen", "ant", "bee", "elk", "emu", "yak"]
    questions = [("user", f"{i}: a {words[i % 10]}?") for i in range(60)]
    talks = [messages(question, ("assistant", "Aye aye, captain.")) for question in questions]
    return write(path, [{"messages": talk} for talk in talks])
