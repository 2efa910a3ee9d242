"""Fine-tuning: configs/finetune.yaml teaches a small model a format, on two processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dist_template.text import causal_lm, causal_lm_config
from tests.support import chats
from tests.support.runs import CONFIGS, OURS, Workers, newest
from tests.support.strategies import flags_of
from tests.support.tiers import tiers
from tests.support.wings import RunRecord, export

ANSWER = "Aye aye, captain."
COMMON = [
    "--run.report=false", "--data.seq_len=128", "--data.global_batch_size=8",
    "--data.micro_batch_size=2", "--data.validation_share=0.1", "--data.test_share=0",
    "--model.sample_tokens=48", "--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1",
    "--trainer.logger=false",
]  # fmt: skip


def flags(folder: Path, source: Path, *more: str) -> list[str]:
    return [
        f"--config={CONFIGS}/finetune.yaml", f"--data.source.paths=[{source}]",
        f"--model.pretrained={folder}", f"--data.tokenizer.path={folder}",
        f"--run.root={folder}/runs", f"--data.cache_dir={folder}/cache", *COMMON, *more,
    ]  # fmt: skip


def answers(samples: str, step: int) -> list[str]:
    """The generated answers of one validation."""
    part = samples.split(f"--- step {step}\n")[1].split("--- step")[0]
    return [one.split("\n[reference] ")[0] for one in part.split("[answer] ")[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["ddp", "fsdp2"], daily=["fsdp2"]))
def test_a_model_learns_a_format_of_answers_and_is_exported(strategy: str, tmp_path: Path) -> None:
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
    assert "<|im_start|>assistant\n[[<think>" in shown and f"{ANSWER}<|im_end|>\n]]" in shown

    into = [f"--checkpoint={newest(record.run)}", f"--output={tmp_path}/out"]
    export.main(["export", *given, *into], OURS)
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    original = (chats.TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
    assert tokenizer.chat_template == original, "it serves with the template that was published"
    assert ANSWER in answer_of(exported, tokenizer)
    with torch.no_grad():
        logits = exported(torch.arange(60).view(2, 30)).logits
    torch.testing.assert_close(logits, trained_logits(record, exported), atol=1e-5, rtol=0)


def answer_of(model: Any, tokenizer: Any) -> str:
    """What it says when it is served with the tokenizer's template."""
    question = chats.messages(("user", "99: a gnu?"))
    options = {"add_generation_prompt": True, "return_tensors": "pt"}
    prompt = tokenizer.apply_chat_template(question, **options)
    said = model.generate(**prompt, max_new_tokens=48, do_sample=False)[0]
    return tokenizer.decode(said[prompt["input_ids"].shape[1] :])


def trained_logits(record: Any, exported: Any) -> torch.Tensor:
    """Of the same architecture with the weights that the training ended with."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(exported.config).eval()
    state = {name.removeprefix("model."): tensor for name, tensor in record.end.items()}
    found = model.load_state_dict(state, strict=False)
    assert not found.unexpected_keys and {*found.missing_keys} <= {"lm_head.weight"}, "it is tied"
    with torch.no_grad():
        return model(torch.arange(60).view(2, 30)).logits


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Weights without a chat template, and the flags that teach them one with two more tokens."""
    folder = tmp_path_factory.mktemp("base")
    model = chats.weights(chats.tokenizer(folder / "model", "base"))
    template = folder / "own.jinja"
    template.write_text(chats.TAGGED)
    given = flags(model, chats.taught(folder / "chats.jsonl"), f"--data.source.template={template}")
    given += ['--data.tokenizer.special_tokens=["<|im_start|>", "<|im_end|>"]']
    given += ["--data.tokenizer.eos_token=<|im_end|>", "--model.optim.learning_rate=0.01"]
    given += ["--trainer.max_steps=3", "--trainer.max_epochs=-1"]
    with Workers(1) as workers:
        workers.run(["prepare", *given], folder / "prepare").check()
        record = workers.run(["fit", *given, "--trainer.devices=1"], folder / "one").check()
    return folder, [*given, str(record.folder)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", tiers(["ddp", "fsdp2", "tp", "zero2", "zero3"], daily=["fsdp2", "zero3"])
)
def test_embeddings_get_rows_for_new_special_tokens(
    strategy: str, base: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, given = base
    one = RunRecord(Path(given[-1]), {0: "done"})
    more = ["--trainer.devices=2", *flags_of(strategy), f"--run.root={tmp_path}"]
    with Workers(2) as workers:
        record = workers.run(["fit", *given[:-1], *more], tmp_path / strategy).check()
    (name,) = [name for name in one.start if name.endswith("embed_tokens.weight")]
    assert one.start[name].shape[0] == 256 + 2 + 2, "bytes, the base model's, the two new ones"
    assert torch.equal(record.start[name], one.start[name]), "the new rows equal one process's"
    assert record.loss == pytest.approx(one.loss, rel=1e-5)
    assert (record.end[name][-2:] != one.start[name][-2:]).any(), "they are trained"


def test_all_ranks_sample_and_stop_alike(tmp_path: Path) -> None:
    """Only rank 0 loads weights, and the folder's generation_config.json with them."""
    folder = str(chats.weights(chats.tokenizer(tmp_path / "model")))
    data = SimpleNamespace(vocab_size=259, eos_token_id=9, seq_len=64)
    built = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            config = causal_lm_config({}, folder, None, data)
            model: Any = causal_lm(config, folder, data.vocab_size)
            built.append(model.generation_config.to_dict())
    first, other = built
    assert first == other
    assert first["top_k"] == 20
    assert first["eos_token_id"] == [257, 0, 9], "the folder's and the tokenizer's"
