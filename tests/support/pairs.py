"""Preferences for tests: pairs of answers, a tokenizer, and trl's numbers for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support import chats

RECORDS = [
    {"prompt": f"q{i} ", "chosen": f"good {i * i}", "rejected": f"bad {i}"} for i in range(8)
]
LENGTHS = [
    {"prompt": f"q{i} ", "chosen": "yes" * (1 + i * 7 % 5), "rejected": "no" * (1 + i % 7)}
    for i in range(60)
]


def flags(folder: Path, records: list[Any]) -> list[str]:
    """The data of these records, without held-out pairs."""
    path = chats.write(folder / "pairs.jsonl", records)
    return [
        "--data.source=Preferences", f"--data.source.paths=[{path}]", "--data.tokenizer=Pretrained",
        f"--data.tokenizer.path={chats.tokenizer(folder / 'tokenizer')}", "--data.prompts=[]",
        f"--data.cache_dir={folder / 'cache'}", "--data.validation_share=0", "--data.test_share=0",
    ]  # fmt: skip


def save_llama(folder: Path, vocab_size: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def losses_of_trl(model: str, tokenizer: str, output: str) -> list[float]:
    """Of DPOTrainer: 4 steps of plain SGD with all pairs."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(
        output_dir=output, per_device_train_batch_size=8, max_steps=4, learning_rate=0.5, beta=0.1,
        optim="sgd", lr_scheduler_type="constant", max_grad_norm=1e9, logging_steps=1, use_cpu=True,
        report_to=[], save_strategy="no", bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    policy, reference = (AutoModelForCausalLM.from_pretrained(model) for _ in range(2))
    trainer = DPOTrainer(
        policy, reference, arguments, train_dataset=Dataset.from_list(RECORDS),
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
    )  # fmt: skip
    trainer.train()
    return [float(logged["loss"]) for logged in trainer.state.log_history if "loss" in logged]


if __name__ == "__main__":
    print(json.dumps(losses_of_trl(*sys.argv[1:])))
