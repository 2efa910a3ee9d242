"""`plan` of models whose code fails: with one checkpointing, or whenever they are built."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dist_template import BlockConfig
from dist_template.parallel.blocks import wrap_blocks
from tests.support.line import command
from tests.support.wings import Traced

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    "vocab_size": 257,
}  # fmt: skip
PLAN = [
    "plan",
    "--devices=2",
    "--memory=80GB",
    "--trainer.accelerator=gpu",
    "--data.micro_batch_size=1",
]


def plan(architecture: dict[str, Any]) -> int:
    return command([*PLAN, f"--model.architecture={json.dumps(architecture)}"])


@pytest.mark.parametrize("kind", ["grouped_mm", "batched_mm", "eager"])
def test_a_bias_that_is_added_in_place_is_recomputed(kind: str) -> None:
    """gpt_oss's experts: what selective checkpointing keeps must not change after it is kept."""
    found = {}
    for mode in ("none", "selective"):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**GPT_OSS), experts_implementation=kind
        )
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        wrap_blocks(model.train(), BlockConfig(mode))
        tokens = torch.randint(0, 257, (2, 32))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        found[mode] = [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
    assert len(found["none"]) == len(found["selective"]) > 20
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_gpt_oss_is_planned_with_every_checkpointing(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(GPT_OSS) == 0
    printed = capsys.readouterr().out
    assert "checkpointing selective" in printed and "Not planned" not in printed


def test_a_checkpointing_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    traced = Traced.activations

    def failing(self: Traced, *given: Any) -> tuple[float, float]:
        if given[-1] == "selective":
            raise RuntimeError("has been mutated")
        return traced(self, *given)

    monkeypatch.setattr(Traced, "activations", failing)
    assert plan(GPT_OSS) == 0
    printed = capsys.readouterr().out
    assert "ddp with checkpointing selective" in printed and "(has been mutated)" in printed
    assert "checkpointing none  checkpointing full" in printed


def test_a_model_that_cannot_be_built_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan({"model_type": "dbrx", "vocab_size": 257}) == 2
    error = capsys.readouterr().err
    assert "model.architecture with model_type 'dbrx' cannot be built: AttributeError" in error
    assert error.count("\n") == 1
