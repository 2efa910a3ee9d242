"""Preferences for tests: pairs of answers, a tokenizer, and trl's numbers for them."""

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
RATED_LENGTHS = [
    {"prompt": record["prompt"], "completion": record[key], "label": key == "chosen"}
    for record in LENGTHS
    for key in ("chosen", "rejected")
]


def flags(folder: Path, records: list[Any], source: str = "Preferences") -> list[str]:
    """The data of these records, without held-out pairs."""
    path = chats.write(folder / "pairs.jsonl", records)
    return [
        f"--data.source={source}",
        f"--data.source.paths=[{path}]",
        "--data.tokenizer=Pretrained",
        f"--data.tokenizer.path={chats.tokenizer(folder / 'tokenizer')}",
        "--data.prompts=[]",
        f"--data.cache_dir={folder / 'cache'}",
        "--data.validation_share=0",
        "--data.test_share=0",
    ]


def save_llama(folder: Path, vocab_size: int, has_reward_head: bool = False) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.06 if has_reward_head else 0.02,
    )
    config.num_labels = 1
    kind = LlamaForSequenceClassification if has_reward_head else LlamaForCausalLM
    kind(config).save_pretrained(folder)


ROLES = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
# Its NLL is of the prompt too, of which a token at the start is no label; of all tokens alike.
ODDS = [
    record | {"prompt": "<|im_start|>", "chosen": f"good {i + 10}"}
    for i, record in enumerate(RECORDS)
]
RATED = [{"prompt": f"q{i} ", "completion": f"good {i * i}", "label": i % 3 > 0} for i in range(8)]
IN_TURNS = [
    {key: chats.messages((ROLES[key], text)) for key, text in record.items()} for record in RECORDS
]  # a template ends with another token than EOS: it is read by a reward model
KINDS = ("ipo", "simpo", "orpo", "kto", "reward")  # simpo compares with no reference
OF_TRL = {"dpo": RECORDS, "kto": RATED, "orpo": ODDS, "reward": IN_TURNS}
# CPOTrainer starts a prompt with BOS if it has none: a prompt that has it, for both.
STARTED = [record | {"prompt": f"<|im_start|>{record['prompt']}"} for record in RECORDS]
OF_TRL |= {"ipo": RECORDS, "simpo": STARTED}
RATES = dict.fromkeys(OF_TRL, 0.5) | {"ipo": 0.02, "simpo": 1.0}  # of plain SGD


def losses_of_trl(kind: str, model: str, tokenizer: str, output: str) -> list[float]:
    """Of trl's trainer: 4 steps of plain SGD with all records."""
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    class OfTheStepBefore(trl.KTOTrainer):
        """trl's, with the distance from the reference of the step before."""

        before = torch.zeros(())

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            gather = self.accelerator.gather_for_metrics

            def delayed(distance: Any) -> Any:  # gathered first
                vars(self.accelerator).pop("gather_for_metrics")
                before, self.before = self.before, gather(distance)
                return before

            vars(self.accelerator)["gather_for_metrics"] = delayed
            return super().compute_loss(*args, **kwargs)

    configs: Any = {"dpo": trl.DPOConfig, "kto": trl.KTOConfig, "orpo": ORPOConfig}
    trainers: Any = {"dpo": trl.DPOTrainer, "kto": OfTheStepBefore, "orpo": ORPOTrainer}
    with_head: Any = transformers.AutoModelForCausalLM
    given: Any = {"beta": 0.1}
    configs |= {"ipo": trl.DPOConfig, "simpo": CPOConfig}
    trainers |= {"ipo": trl.DPOTrainer, "simpo": CPOTrainer}
    if kind in ("ipo", "simpo"):
        given["loss_type"] = kind
    if kind == "simpo":  # without its term of the chosen answer's likelihood
        given |= {"cpo_alpha": 0.0, "simpo_gamma": 0.7}
    if kind == "reward":
        configs, trainers, given = {kind: trl.RewardConfig}, {kind: trl.RewardTrainer}, {}
        with_head = transformers.AutoModelForSequenceClassification
    arguments = configs[kind](
        output_dir=output,
        per_device_train_batch_size=8,
        max_steps=4,
        learning_rate=RATES[kind],
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        bf16=False,
        gradient_checkpointing=False,
        **given,
    )
    models = [with_head.from_pretrained(model) for _ in range(1 + (kind in ("dpo", "ipo", "kto")))]
    tokens: Any = transformers.AutoTokenizer.from_pretrained(tokenizer)
    tokens.pad_token = tokens.eos_token
    trainer = trainers[kind](
        **dict(zip(("model", "ref_model"), models, strict=False)),
        args=arguments,
        train_dataset=Dataset.from_list(OF_TRL[kind]),
        processing_class=tokens,
    )
    trainer.train()
    return [float(logged["loss"]) for logged in trainer.state.log_history if "loss" in logged]


if __name__ == "__main__":
    print(json.dumps(losses_of_trl(*sys.argv[1:])))
