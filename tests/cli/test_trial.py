"""A model that a strategy cannot run is refused before any process starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from trainer_dev.module import LanguageModule

from dist_template.strategies import MeshStrategy
from tests.support.library import Machine, violations

DATA = SimpleNamespace(is_prepared=True, vocab_size=61, seq_len=64, eos_token_id=1, validation_share=0.1)
SIZES = {
    "hidden_size": 40, "intermediate_size": 44, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 14, "num_experts_per_tok": 2}


def sentences(architecture: dict[str, Any], **sizes: Any) -> list[str]:
    own = architecture["model_type"] in ("bloom", "mpt", "opt", "gpt_neox")  # names of their own
    module = LanguageModule(architecture=architecture if own else SIZES | architecture)
    trainer = {"strategy": MeshStrategy(**sizes), "max_steps": 10}
    return violations(Machine("cuda", 4), trainer, module, DATA, module.build_config(DATA))


LLAMA_4 = {"model_type": "llama4_text", "intermediate_size_mlp": 44, "num_local_experts": 3, "num_experts_per_tok": 1}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "bloom pp": ({"model_type": "bloom", "hidden_size": 40, "n_layer": 5, "n_head": 4}, {"pp_size": 2}, "hidden"),
    "mpt pp": ({"model_type": "mpt", "d_model": 40, "n_layers": 5, "n_heads": 4}, {"pp_size": 4}, "hidden states of"),
    "opt pp": ({"model_type": "opt", "hidden_size": 40, "num_attention_heads": 4}, {"pp_size": 2}, "of their use"),
    "llama4 pp": (LLAMA_4, {"pp_size": 2}, "stage 2 of 2 needs more than"),
    "llama4 tp": (LLAMA_4, {"tp_size": 2}, "modified inplace"),
    "cohere tp": ({"model_type": "cohere", "use_qk_norm": True}, {"tp_size": 2}, "a forward pass with tp_size 2"),
    "llama4 cp": (LLAMA_4, {"cp_size": 2}, "numbers a rank's tokens as if they were all"),
    "doge cp": ({"model_type": "doge"}, {"cp_size": 2}, "does not run with cp_size 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_would_crash_is_refused(case: str) -> None:
    architecture, sizes, fragment = REFUSED[case]
    (sentence,) = sentences(architecture, **sizes)
    assert fragment in sentence
    assert architecture["model_type"] in sentence
    assert f"{next(iter(sizes))} to 1" in sentence


RUNS = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "gpt_neox": {"model_type": "gpt_neox", "hidden_size": 40, "num_hidden_layers": 5, "num_attention_heads": 4},
    "glm4_moe": {"model_type": "glm4_moe", "use_qk_norm": True, "n_routed_experts": 3, **EXPERTS},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3},
    "llama4 without tuning": {**LLAMA_4, "attn_temperature_tuning": False},
}
BOTH = {"tp_size": 2, "cp_size": 2}


@pytest.mark.parametrize("model", RUNS)
def test_a_model_that_runs_is_accepted(model: str) -> None:
    several = [{"cp_size": 2}] if "llama4" in model else [{"pp_size": 2}, {"tp_size": 2}, {"cp_size": 2}, BOTH]
    assert [sentences(RUNS[model], **sizes) for sizes in several] == [[] for _ in several]


def test_sequences_are_shared_by_the_heads_of_a_tensor_parallel_rank() -> None:
    assert sentences({"model_type": "llama", "num_attention_heads": 6, "hidden_size": 36}, cp_size=2) == []
    (sentence,) = sentences({"model_type": "llama", "num_attention_heads": 6, "hidden_size": 36}, **BOTH)
    assert "cp_size 2 does not divide a rank's (tp_size 2) 3 attention heads" in sentence


def test_a_strategy_that_shares_nothing_inside_of_the_model_builds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LanguageModule, "build_model", lambda *_: pytest.fail("built"))
    assert sentences(RUNS["llama"], fsdp_size=4) == []
