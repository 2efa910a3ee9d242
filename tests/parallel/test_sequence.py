"""Ranks that share sequences compute what one process computes, and refuse the rest."""

from typing import Any

import pytest
from trainer_dev.data import DataModule
from transformers import AutoConfig

from dist_template.compat.transformers import reason_against_sequence_shards
from dist_template.strategies import MeshStrategy
from dist_template.text import Preferences
from tests.support.limits import violations_of
from tests.support.modules import on_meta
from tests.support.parity import MODELS, Trainings, assert_trains_alike
from tests.support.strategies import ARGS
from tests.support.tiers import tiers

GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
BASE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
# Fewer heads of keys than ranks, a window in one layer; llama's and deepseek_v3's are in parity.py.
MODELS["qwen3_window"] = str(
    {"model_type": "qwen3", **BASE, **GROUPED, **WINDOW, "num_key_value_heads": 1}
)
PRODUCTS = [  # model, processes, rows of a micro-batch, argument of the strategy
    ("qwen3_window", 2, 4, "cp_size=2"), ("qwen3_window", 4, 4, "cp_size=4"),
    ("llama", 4, 4, "tp_size=2"), ("llama", 4, 4, "pp_size=2"), ("llama", 4, 4, "cp_size=4"),
    ("llama", 2, 4, "cpu_offload=true"), ("deepseek_v3", 2, 4, "ep_size=2"),
    ("deepseek_v3", 4, 4, "pp_size=2"), ("deepseek_v3", 4, 2, "dp_replicate_size=2"),
]  # fmt: skip
DAILY = [PRODUCTS[0], ("deepseek_v3", 2, 4, "ep_size=2")]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "processes", "rows", "size"), tiers(PRODUCTS, DAILY))
def test_ranks_that_share_sequences_train_as_one_process(
    train: Trainings, model: str, processes: int, rows: int, size: str
) -> None:
    """Rows have documents that end within a rank's tokens."""
    flags = [f"{ARGS}.{size}", f"--data.micro_batch_size={rows}"]
    one, many = train(model, "one"), train(model, "cp", *flags, processes=processes)
    assert_trains_alike(many, one)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
MAMBA = {"num_heads": 8, "head_dim": 8, "n_groups": 1}
REFUSED = [
    ({"model_type": "mamba2", **MAMBA}, "transformers' kernels"),
    ({"model_type": "lfm2", **GROUPED, **CONVOLUTION}, "layers other than attention"),
    ({"model_type": "gpt_oss", **GROUPED}, "transformers' kernels"),  # attention sinks
    ({"model_type": "llama", **GROUPED, "attn_implementation": "eager"}, "transformers' kernels"),
    ({"model_type": "llama", **GROUPED, "rope_parameters": DYNAMIC}, "largest position"),
]


@pytest.mark.parametrize(("architecture", "words"), REFUSED)
def test_a_model_that_combines_tokens_otherwise_is_refused(architecture: Any, words: str) -> None:
    assert words in reason_against_sequence_shards(on_meta(**BASE | architecture))


LLAMA_4 = AutoConfig.for_model("llama4_text", num_attention_heads=8)
SIX = AutoConfig.for_model("llama", num_attention_heads=6, hidden_size=36)
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"cp_size": 3}, "cp_size 3 must divide fsdp_size 8"),
    ({"data": DataModule(seq_len=102)}, "data.seq_len 102 is not a multiple of cp_size 4"),
    ({"cp_size": 8}, "cp_size 8 does not divide the model's 12 attention heads"),
    ({"cp_size": 2, "tp_size": 2, "config": SIX}, "not divide a rank's (tp_size 2) 3 attention"),
    ({"data": DataModule(Preferences(["nowhere"]))}, "would split pairs of data.source"),
    ({"config": None}, "cp_size 4 needs a model of transformers"),
    ({"config": LLAMA_4}, "numbers a rank's tokens as if they were all"),  # proof.json
]
TWELVE = AutoConfig.for_model("llama", num_attention_heads=12, hidden_size=768)


@pytest.mark.parametrize(("given", "words"), IMPOSSIBLE, ids=[words for _, words in IMPOSSIBLE])
def test_the_impossible_is_refused_before_the_start(given: dict[str, Any], words: str) -> None:
    sizes: Any = {"cp_size": 4} | {name: size for name, size in given.items() if "size" in name}
    others = {name: value for name, value in given.items() if name not in sizes}
    default: Any = {"data": DataModule(), "config": TWELVE}
    (sentence,) = violations_of(MeshStrategy(**sizes), **default | others)
    assert words in sentence
