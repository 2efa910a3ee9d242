"""DeepSeek-V3.2, V4 and GLM-5: indexers that get no gradient, and experts by a table of tokens."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from trainer_dev.module import LanguageModule
from transformers import CONFIG_MAPPING

from dist_template.wings.rehearse.shrink_model import shrink_architecture
from tests.support.parity import MODELS
from tests.support.runs import refused, small

DATA: Any = SimpleNamespace(vocab_size=211, eos_token_id=1, seq_len=24)


def build(kind: str) -> Any:
    return LanguageModule(yaml.safe_load(MODELS[kind])).build_network(DATA)


@pytest.mark.parametrize("kind", ["deepseek_v32", "deepseek_v4", "glm_moe_dsa", "llama"])
def test_only_what_no_gradient_reaches_is_frozen(kind: str) -> None:
    model = build(kind)
    tokens = torch.randint(2, 211, (2, 24))
    model(input_ids=tokens, use_cache=False).logits.square().sum().backward()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, p in model.named_parameters() if p.grad is None}
    assert frozen == {name for name, _ in model.named_parameters() if ".indexer." in name}


def test_hash_routers_spread_tokens_over_all_experts() -> None:
    table = build("deepseek_v4").model.layers[0].mlp.gate.tid2eid
    assert len(table) == 211
    assert (table[:, 0] != table[:, 1]).all(), "a token's experts differ"
    assert table.flatten().bincount(minlength=4).min() > 60, "of 105 on average"


@pytest.mark.parametrize("kind", ["deepseek_v32", "deepseek_v4", "glm_moe_dsa"])
def test_reduced_models_leave_tokens_out_as_the_full_ones_do(kind: str) -> None:
    small = shrink_architecture(CONFIG_MAPPING[kind](), seq_len=32)
    assert small["index_topk"] == 8
    assert all(rate <= 8 for rate in small.get("compress_rates", {}).values())


@pytest.mark.slow
def test_ddp_names_what_gets_no_gradient(
    corpus: Path, cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = [*small(corpus, cache, tmp_path), "--trainer.strategy=ddp", "--trainer.logger=false"]
    flags += ["--model.architecture={model_type: bart, is_decoder: true, d_model: 32}"]
    sentence = refused("fit", [*flags, "--trainer.num_sanity_val_steps=0"], capfd)
    assert "DDP needs a gradient of each parameter, and model." in sentence
    assert "ddp_find_unused_parameters_true" in sentence
