"""Fine-tuning on conversations: configs/finetune.yaml teaches a small model a format, on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_template.tools import export
from tests.support import chats
from tests.support.runs import CONFIGS, OURS, Workers, newest
from tests.support.strategies import flags_of

ANSWER = "Aye aye, captain."
COMMON = [
    "--run.report=false", "--data.seq_len=128", "--data.global_batch_size=8", "--data.micro_batch_size=2",
    "--data.validation_share=0.1", "--model.sample_tokens=48", "--trainer.accelerator=cpu",
    "--trainer.log_every_n_steps=1", "--trainer.logger=false",
]  # fmt: skip


def flags(folder: Path, source: Path, *more: str) -> list[str]:
    return [
        f"--config={CONFIGS}/finetune.yaml", f"--data.source.paths=[{source}]", f"--model.pretrained={folder}",
        f"--data.tokenizer.path={folder}", f"--run.root={folder}/runs", f"--data.cache_dir={folder}/cache",
        *COMMON, *more,
    ]  # fmt: skip


def answers(samples: str, step: int) -> list[str]:
    """The generated answers of one validation."""
    part = samples.split(f"--- step {step}\n")[1].split("--- step")[0]
    return [one.split("\n[reference] ")[0] for one in part.split("[answer] ")[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_model_learns_the_format_of_conversations_and_is_exported(strategy: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = chats.weights(chats.tokenizer(tmp_path / "model"))
    steps = ["--trainer.max_steps=40", "--trainer.max_epochs=-1", "--trainer.val_check_interval=10"]
    given = flags(model, chats.taught(tmp_path / "chats.jsonl"), "--model.optim.learning_rate=0.01")
    training = [*given, *steps, "--trainer.devices=2", *flags_of(strategy)]
    with Workers(2) as workers:
        workers.run(["prepare", *training], tmp_path / "prepare").check()
        record = workers.run(["fit", *training], tmp_path / strategy).check()
    losses = [metrics["eval/loss"] for _, metrics in sorted(record.eval().items())]
    assert losses[-1] < 0.3 * losses[0] and record.loss[40] < 0.3 * record.loss[1]
    assert all("eval/bits_per_byte" not in metrics for metrics in record.eval().values())
    samples = (record.run / "samples.txt").read_text(encoding="utf-8")
    assert samples.count("[reference] <think>\n\n</think>\n\nAye aye, captain.<|im_end|>") >= 4
    assert not [answer for answer in answers(samples, 10) if ANSWER in answer]
    assert all(ANSWER in answer for answer in answers(samples, 40)) and answers(samples, 40)
    shown = (tmp_path / "prepare" / "rank0.log").read_text(encoding="utf-8")
    assert "<|im_start|>assistant\n>>><think>" in shown and "Aye aye, captain.<|im_end|>\n<<<" in shown

    export.main(["export", *given, f"--checkpoint={newest(record.run)}", f"--output={tmp_path}/out"], OURS)
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    original = (chats.TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
    assert tokenizer.chat_template == original, "it serves with the template that was published"
    prompt = tokenizer.apply_chat_template(
        chats.messages(("user", "99: a gnu?")), add_generation_prompt=True, return_tensors="pt"
    )
    said = exported.generate(**prompt, max_new_tokens=48, do_sample=False)[0]
    assert ANSWER in tokenizer.decode(said[prompt["input_ids"].shape[1] :])
    with torch.no_grad():
        logits = exported(torch.arange(60).view(2, 30)).logits
    torch.testing.assert_close(logits, trained_logits(record, exported), atol=1e-5, rtol=0)


def trained_logits(record: Any, exported: Any) -> torch.Tensor:
    """Of the same architecture with the weights that the training ended with."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(exported.config).eval()
    state = {name.removeprefix("model."): tensor for name, tensor in record.end.items()}
    found = model.load_state_dict(state, strict=False)
    assert not found.unexpected_keys and set(found.missing_keys) <= {"lm_head.weight"}, "the output layer is tied"
    with torch.no_grad():
        return model(torch.arange(60).view(2, 30)).logits
