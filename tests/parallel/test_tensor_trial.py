"""Gradients that transformers' tensor-parallel plans forget are summed; what no rule mends is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from dist_template.compat.parallel_styles import STYLE
from dist_template.compat.transformers import run_on_meta
from dist_template.parallel.tensor_trial import missing_rules
from tests.support.parity import MODELS, SHORT, Trainings, assert_close
from tests.support.runs import run
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

BASE: dict[str, Any] = {
    "hidden_size": 36, "intermediate_size": 44, "num_hidden_layers": 3, "vocab_size": 61, "num_attention_heads": 6,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 14, "n_routed_experts": 6, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 10, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6}
FULL = {"num_key_value_heads": 6, "n_group": 1, "topk_group": 1}
PHI = {"qk_layernorm": True, "partial_rotary_factor": 1.0}
HEADS = "model.layers.*.self_attn"
FORGOTTEN = {  # architecture: the modules that its plan forgets
    "glm4_moe": (EXPERTS | {"use_qk_norm": True}, {f"{HEADS}.q_norm", f"{HEADS}.k_norm"}),
    "phi": (PHI, {f"{HEADS}.q_layernorm", f"{HEADS}.k_layernorm"}),
    "apertus": ({}, {"model.layers.*.mlp.act_fn"}),
    "qwen3": ({}, set()),  # its plan names them
    "olmo2": ({}, set()),  # its norms are of all heads, whose features are gathered
    "deepseek_v3": (EXPERTS | LATENT | FULL, set()),  # its norms are before the heads
    "gpt_oss": ({"num_local_experts": 4}, set()),  # its sinks are sharded
}
MODELS |= {
    "glm4_moe": "{model_type: glm4_moe, use_qk_norm: true, hidden_size: 36, intermediate_size: 44,"
    " moe_intermediate_size: 16, num_hidden_layers: 2, num_attention_heads: 6, num_key_value_heads: 2, head_dim: 6,"
    " first_k_dense_replace: 1, n_routed_experts: 4, num_experts_per_tok: 2, partial_rotary_factor: 1.0}",
    "phi": "{model_type: phi, qk_layernorm: true, hidden_size: 36, intermediate_size: 44, num_hidden_layers: 2,"
    " num_attention_heads: 6, partial_rotary_factor: 1.0, resid_pdrop: 0.0}",
    "apertus": "{model_type: apertus, hidden_size: 36, intermediate_size: 44, num_hidden_layers: 2,"
    " num_attention_heads: 6, num_key_value_heads: 2}",
}


def build(kind: str, **architecture: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **BASE | architecture))


def rules(model: Any, **plan: str) -> dict[str, str]:
    return missing_rules(model, model.tp_plan | plan, 2, partial(run_on_meta, model))


@pytest.mark.parametrize("kind", FORGOTTEN)
def test_forgotten_rules_are_found(kind: str) -> None:
    architecture, expected = FORGOTTEN[kind]
    model = build(kind, **architecture)
    shapes = {name: each.shape for name, each in model.named_parameters()}
    assert rules(model) == dict.fromkeys(expected, STYLE)
    assert {name: each.shape for name, each in model.named_parameters()} == shapes


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, str], str]] = {
    "norms of all heads": ("cohere", {"use_qk_norm": True}, {}, "a forward pass with tp_size 2 fails"),
    "a mask of all heads": ("doge", {}, {}, "a forward pass with tp_size 2 fails"),
    "a sum in place": ("llama4_text", {"intermediate_size_mlp": 44}, {}, "modified inplace"),
    "a sum of complete gradients": ("llama", {}, {"model.norm": STYLE}, "model.norm.weight is complete"),
    "features of another layer": ("llama", {}, {f"{HEADS}.v_proj": "rowwise"}, "is given 36 features of 36"),
    "a rule that says otherwise": ("phi", PHI, {f"{HEADS}.q_layernorm": "replicate"}, "no rule of"),
    "data on the host": ("longcat_flash", {"num_layers": 1, "num_key_value_heads": 6}, {}, "cannot be traced"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_rule_mends_is_refused(case: str) -> None:
    kind, architecture, plan, fragment = REFUSED[case]
    with pytest.raises(ValueError, match=fragment):
        rules(build(kind, **architecture), **plan)


class Gated(nn.Module):
    """Two layers; what is computed from their input scales the features of a rank between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(7, 10), nn.Linear(7, 1), nn.Linear(10, 7)
        self.scale, self.before = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(7))

    def forward(self, hidden: Any, before: bool, gated: bool) -> Any:
        hidden = hidden * self.before if before else hidden
        features = self.up(hidden) * self.scale
        return self.down(features * self.gate(hidden) if gated else features)


def test_the_graph_shows_which_gradients_are_partial() -> None:
    with torch.device("meta"):
        model, hidden = nn.Sequential(Gated()), torch.ones(1, 7)
    plan = {"0.up": "colwise", "0.down": "rowwise", "0.gate": "colwise_gather_output"}
    find = partial(missing_rules, model, plan, 2)
    assert find(lambda: model[0](hidden, before=False, gated=False)) == {"0": STYLE}
    with pytest.raises(ValueError, match="0.before is complete"):  # a rule is for all parameters of a module
        find(lambda: model[0](hidden, before=True, gated=False))
    with pytest.raises(ValueError, match=r"output of 0.gate \(colwise_gather_output\), which a rank's features use"):
        find(lambda: model[0](hidden, before=False, gated=True))


@pytest.mark.slow
@pytest.mark.parametrize("model", tiers(["glm4_moe", "phi", "apertus"], daily=["glm4_moe", "phi"]))
def test_tensor_parallelism_trains_to_the_numbers_of_one_process(train: Trainings, model: str) -> None:
    one, many = train(model, "one", SHORT), train(model, "tp", SHORT)
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert_close(many.end, one.end, 1e-5)


def test_a_tied_parameter_that_is_sharded_for_one_owner_alone_is_refused(flags: list[str], capfd: Any) -> None:
    """GPT-NeoX's plan shards the output layer and not the embedding that may share its weights."""
    small = "{model_type: gpt_neox, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2"
    two = [*flags, *flags_of("tp"), "--trainer.devices=2"]
    assert run("fit", *two, f"--model.architecture={small}, num_attention_heads: 2, tie_word_embeddings: true}}") == 2
    assert "share a parameter, and the plan shards one of them" in capfd.readouterr().err
