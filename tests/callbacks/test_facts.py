"""facts.json: the same for every strategy, and null for unknown values."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from dist_template.callbacks.record import write_facts
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.parity import MODELS, Trainings
from tests.support.tiers import tiers

SHORT = "--trainer.max_steps=6"


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    tiers(["ddp", "fsdp2_ep", "fsdp2_tp_ep", "zero2", "zero3"], daily=["fsdp2_ep", "zero3"]),
)
def test_facts_do_not_depend_on_the_strategy(train: Trainings, strategy: str) -> None:  # noqa: F811
    one, many = (
        json.loads((train("deepseek_v3", s, SHORT).run / "facts.json").read_text())
        for s in ("one", strategy)
    )
    with torch.device("meta"):
        config = AutoConfig.for_model(**yaml.safe_load(MODELS["deepseek_v3"]), vocab_size=257)
        model: Any = AutoModelForCausalLM.from_config(config)
    assert one["parameters"]["total"] == sum(p.numel() for p in model.parameters())
    assert one["parameters"]["active"] < one["parameters"]["total"]
    assert many["parameters"] == one["parameters"] and many["model"] == one["model"]
    assert many["training"]["flops_per_token"] == one["training"]["flops_per_token"] > 0
    assert many["data"]["tokens_per_step"] == one["data"]["tokens_per_step"] == 8 * 32
    assert len(many["machine"]["hosts"]) == many["machine"]["world_size"] > 1
    assert many["machine"]["peak_tflops"] is None, "of a CPU no peak is known"


def test_unknown_facts_of_a_custom_model_are_null(tmp_path: Path) -> None:
    module: Any = nn.Linear(2, 2)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(
        is_global_zero=True, datamodule=object(), strategy=strategy, world_size=1, precision="32-true",
        gradient_clip_val=None, estimated_stepping_batches=float("inf"),
    )  # fmt: skip
    write_facts(tmp_path, trainer, module)
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["parameters"] == {
        "total": 6,
        "trainable": 6,
        "in_4_bits": 0,
        "active": 6,
        "embedding": 0,
    }
    assert facts["model"] == dict.fromkeys(facts["model"]) | {"class": "Linear"}
    assert set(facts["data"].values()) == {None}
    assert facts["training"]["flops_per_token"] is None and facts["training"]["max_steps"] is None
