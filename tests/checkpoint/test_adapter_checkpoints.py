"""Checkpoints of adapters hold what is trained, are resumed by every strategy, and are exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.adapters import MODEL, TARGETS, flags, with_random_b
from tests.support.library import quantize, read_full
from tests.support.parity import MODELS, PauseAfter, Trainings
from tests.support.runs import OURS, SMALL_LLAMA, newest, run
from tests.support.tiers import tiers
from tests.support.wings import export

STEPS = ["--trainer.max_steps=6", "--model.optim.warmup=2"]


def trained(
    train: Trainings, strategy: str, *extra: str, kind: str = "experts", **more: Any
) -> Any:
    keys = [*STEPS, *flags(TARGETS[kind]), *extra]
    return train.run("fit", MODEL[kind], strategy, *keys, prelude=with_random_b, **more)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["ddp", "fsdp2_ep", "tp", "zero3"], ["fsdp2_ep"]))
def test_a_resumed_training_equals_the_uninterrupted_one(train: Trainings, strategy: str) -> None:
    """Bit for bit; and the checkpoint has trained parameters and buffers only."""
    whole = trained(train, strategy)
    paused = trained(train, strategy, callbacks=[PauseAfter(3)])
    checkpoint = newest(paused.run)
    resumed = trained(train, strategy, f"--ckpt_path={checkpoint}")
    assert {**paused.loss, **resumed.loss} == whole.loss
    saved = read_full(checkpoint)
    assert all(".lora_" in n or "e_score_correction_bias" in n for n in saved["state_dict"])
    assert len(saved["frozen_base"]["sha256"]) == 64


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num"), tiers([("llama", 3), ("experts", 6)], [("llama", 3)]))
def test_adapters_continue_from_strategy_to_strategy(train: Trainings, kind: str, num: int) -> None:
    """Over other numbers of ranks too: each leg has the losses of an uninterrupted training."""
    expected = trained(train, "one", kind=kind).loss
    checkpoint: list[str] = []
    for number, strategy in enumerate(["fsdp2", "zero3", "tp", "hsdp", "zero2", "one"][:num]):
        leg = trained(train, strategy, *checkpoint, kind=kind, callbacks=[PauseAfter(number + 1)])
        assert leg.loss == pytest.approx({number + 1: expected[number + 1]}, rel=1e-5), strategy
        checkpoint = [f"--ckpt_path={newest(leg.run)}"]


@pytest.fixture
def quick(flags: list[str]) -> list[str]:
    keys = ["--model.adapter.targets=[q_proj, down_proj]", "--model.optim.learning_rate=0.05"]
    keys += ["--trainer.max_steps=2", "--trainer.limit_val_batches=0", "--model.optim.warmup=0"]
    return [*flags, *keys]


def exported(flags: list[str], output: Path, *more: str) -> Path:
    ours = [flag for flag in flags if not flag.startswith(("--trainer.", "--last_checkpoint."))]
    export.main(["export", *ours, "--checkpoint=last", f"--output={output}", *more], OURS)
    return output


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(60).view(2, 30)).logits


@pytest.mark.parametrize("kind", ["llama", "deepseek", "llama in 4 bits", "tied llama"])
def test_an_adapter_folder_and_merged_weights_give_the_trained_logits(
    quick: list[str], tmp_path: Path, kind: str
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    quick = [*quick, "--model.adapter.trainable=[norm]", f"--model.pretrained={base}"]
    if kind == "deepseek":
        quick.append("--model.adapter.targets=[q_a_proj, gate_up_proj, down_proj]")
    tied = SMALL_LLAMA[:-1] + ", tie_word_embeddings: true}"
    if kind == "tied llama":
        quick.append("--model.adapter.trainable=[embed_tokens]")
    save_base({"deepseek": kind, "tied llama": tied}.get(kind, SMALL_LLAMA), base)
    if in_4_bits := kind.endswith("bits"):
        quick.append("--model.adapter.quantize=nf4")
    assert run("fit", *quick) == 0
    plain = AutoModelForCausalLM.from_pretrained(base).requires_grad_(False)
    if in_4_bits:
        quantize(plain)
    untrained = logits(plain)
    folder = exported(quick, tmp_path / "merged", "--adapter=merged")
    merged = AutoModelForCausalLM.from_pretrained(folder)
    adapted = PeftModel.from_pretrained(plain, str(exported(quick, tmp_path / "peft")))
    assert (logits(merged) - untrained).abs().max() > 1e-3, "training must have changed something"
    assert torch.allclose(logits(adapted), logits(merged), atol=1e-5)


def save_base(architecture: str, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = yaml.safe_load(MODELS["deepseek_v3"] if architecture == "deepseek" else architecture)
    torch.manual_seed(1)
    config = AutoConfig.for_model(**fields, vocab_size=257, max_position_embeddings=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
