"""Tensor-parallel plans, shared sequences, an own axis: as one process computes, or refused."""

from typing import Any

import pytest
from trainer_dev.data import DataModule
from transformers import AutoConfig

from dist_template import InputError
from dist_template.cli.limits import Machine
from dist_template.compat.transformers import reason_against_sequence_shards
from dist_template.parallel.mesh.shard import STYLE, complete_plan
from dist_template.strategies import MeshStrategy
from dist_template.text import Preferences
from tests.support.limits import violations_of
from tests.support.modules import on_meta
from tests.support.parity import MODELS, Trainings, assert_trains_alike
from tests.support.strategies import ARGS
from tests.support.tiers import tiers

BASE: dict[str, Any] = {"hidden_size": 36, "intermediate_size": 44, "num_hidden_layers": 2}
BASE |= {"num_attention_heads": 6, "num_key_value_heads": 2, "pad_token_id": 0}
EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 10, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
LATENT |= {"v_head_dim": 6}
FULL = {"num_key_value_heads": 6, "n_group": 1, "topk_group": 1}
GLM = EXPERTS | {"use_qk_norm": True, "head_dim": 6, "partial_rotary_factor": 1.0}
PHI = {"qk_layernorm": True, "partial_rotary_factor": 1.0, "resid_pdrop": 0.0}
HEADS = "model.layers.*.self_attn"
KNOWN = {  # architecture: the modules that its plan forgets
    "glm4_moe": (GLM, {f"{HEADS}.q_norm", f"{HEADS}.k_norm"}),
    "phi": (PHI, {f"{HEADS}.q_layernorm", f"{HEADS}.k_layernorm"}),
    "apertus": ({}, {"model.layers.*.mlp.act_fn"}),
    "qwen3": ({}, set()),  # its plan names them
    "olmo2": ({}, set()),  # its norms are of all heads, whose features are gathered
    "deepseek_v3": (EXPERTS | LATENT | FULL, set()),  # its norms are before the heads
    "gpt_oss": ({"num_local_experts": 4}, set()),  # its sinks are sharded
}
# Models that change a layer's output in place, of which autograd forbids that for a distributed one
IN_PLACE: dict[str, dict[str, Any]] = {
    "olmo": {"clip_qkv": 0.5},
    "llama4_text": {
        "intermediate_size_mlp": 56,
        "num_local_experts": 2,
        "head_dim": 8,
        "hidden_size": 48,
        "intermediate_size": 40,
        "use_qk_norm": False,
        "floor_scale": 4,
    },
}
TRAINED = ["glm4_moe", "phi", "apertus", *IN_PLACE]
ARCHITECTURES = {kind: fields for kind, (fields, _) in KNOWN.items()} | IN_PLACE
MODELS |= {kind: f"{BASE | ARCHITECTURES[kind] | {'model_type': kind}}" for kind in TRAINED}


def build(kind: str, **architecture: Any) -> Any:
    return on_meta(model_type=kind, vocab_size=61, **BASE | architecture)


@pytest.mark.parametrize("kind", KNOWN)
def test_forgotten_rules_are_added(kind: str) -> None:
    architecture, expected = KNOWN[kind]
    model = build(kind, **architecture)
    plan = dict(model.tp_plan)
    complete_plan(model, plan)
    assert model.tp_plan == plan | dict.fromkeys(expected, STYLE)


def test_a_parameter_beside_the_heads_that_is_not_known_is_refused() -> None:
    model = build("cohere", use_qk_norm=True)
    said = r"how the gradient of .*q_norm.weight is computed: .*give a rule as \S*tp_plan"
    with pytest.raises(InputError, match=said):
        complete_plan(model, model.tp_plan)
    given = {f"{HEADS}.{name}": "replicate" for name in ("q_norm", "k_norm")}
    complete_plan(model, model.tp_plan | given)
    with pytest.raises(InputError, match="its plan leaves partial gradients"):
        unsound = build("longcat_flash", num_layers=1, num_key_value_heads=6)
        complete_plan(unsound, unsound.tp_plan)


@pytest.mark.slow
@pytest.mark.parametrize("model", tiers(TRAINED, daily=["glm4_moe", "olmo"]))
def test_tensor_parallelism_trains_as_one_process(train: Trainings, model: str) -> None:
    assert_trains_alike(train(model, "tp"), train(model, "one"))


def test_a_tied_parameter_that_is_sharded_for_one_owner_alone_is_refused() -> None:
    """GPT-NeoX's plan shards the output layer and not the embedding that may share its weights."""
    model = build("gpt_neox", tie_word_embeddings=True)
    with pytest.raises(InputError, match="share a parameter, and the plan shards one of them"):
        complete_plan(model, model.tp_plan)


GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SHARED: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
# Fewer heads of keys than ranks, a window in one layer; llama's and deepseek_v3's are in parity.py.
MODELS["qwen3_window"] = str(
    {"model_type": "qwen3", **SHARED, **GROUPED, **WINDOW, "num_key_value_heads": 1}
)
PRODUCTS = [  # model, processes, rows of a micro-batch, argument of the strategy
    ("qwen3_window", 2, 4, "cp_size=2"),
    ("qwen3_window", 4, 4, "cp_size=4"),
    ("llama", 4, 4, "tp_size=2"),
    ("llama", 4, 4, "pp_size=2"),
    ("llama", 4, 4, "cp_size=4"),
    ("llama", 2, 4, "cpu_offload=true"),
    ("deepseek_v3", 2, 4, "ep_size=2"),
    ("deepseek_v3", 4, 4, "pp_size=2"),
    ("deepseek_v3", 4, 2, "dp_replicate_size=2"),
]
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
    assert words in reason_against_sequence_shards(on_meta(**SHARED | architecture))


SIX = AutoConfig.for_model("llama", num_attention_heads=6, hidden_size=36)
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"cp_size": 3}, "cp_size 3 must divide fsdp_size 8"),
    ({"data": DataModule(seq_len=102)}, "102 is not a multiple of trainer.strategy.init_args"),
    ({"cp_size": 8}, "cp_size 8 does not divide the model's 12 attention heads"),
    ({"cp_size": 2, "tp_size": 2, "config": SIX}, "not divide a rank's (tp_size 2) 3 attention"),
    ({"data": DataModule(Preferences(["nowhere"]))}, "would split pairs of data.source"),
    ({"config": None}, "cp_size 4 needs a model of transformers"),
]
TWELVE = AutoConfig.for_model("llama", num_attention_heads=12, hidden_size=768)


@pytest.mark.parametrize(("given", "words"), IMPOSSIBLE, ids=[words for _, words in IMPOSSIBLE])
def test_the_impossible_is_refused_before_the_start(given: dict[str, Any], words: str) -> None:
    sizes: Any = {"cp_size": 4} | {name: size for name, size in given.items() if "size" in name}
    others = {name: value for name, value in given.items() if name not in sizes}
    default: Any = {"data": DataModule(), "config": TWELVE}
    (sentence,) = violations_of(MeshStrategy(**sizes), **default | others)
    assert words in sentence


def mixture(kind: str = "mixtral", **fields: Any) -> Any:
    return AutoConfig.for_model(kind, num_attention_heads=6, num_key_value_heads=2, **fields)


TP = MeshStrategy(tp_size=2, fsdp_size=1)
WIDTHS: list[tuple[Any, dict[str, Any], str, str, str]] = [
    # strategy, sizes, type, precision, what the sentence says
    ("auto", {"hidden_size": 48, "intermediate_size": 24}, "mixtral", "32-true", ""),
    ("auto", {"hidden_size": 48, "intermediate_size": 22}, "mixtral", "32-true", "22 is not a mul"),
    ("ddp", {"hidden_size": 50, "intermediate_size": 24}, "mixtral", "32-true", "hidden_size 50"),
    (TP, {"hidden_size": 48, "intermediate_size": 24}, "mixtral", "32-true", ""),
    (TP, {"hidden_size": 48, "intermediate_size": 20}, "mixtral", "32-true", "a multiple of 8,"),
    (TP, {"hidden_size": 48, "intermediate_size": 24}, "mixtral", "bf16-mixed", "multiple of 16,"),
    ("ddp", {"hidden_size": 48, "moe_intermediate_size": 12}, "qwen3_moe", "bf16-true", "moe_int"),
    (MeshStrategy(ep_size=2), {"hidden_size": 48, "moe_intermediate_size": 12}, "qwen3_moe",
     "32-true", ""),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "sizes", "kind", "precision", "words"), WIDTHS)
def test_the_width_of_an_expert_is_a_multiple_of_16_bytes_or_refused(
    strategy: Any, sizes: dict[str, Any], kind: str, precision: str, words: str
) -> None:
    machine = Machine("cpu", 1 if strategy == "auto" else 2, precision=precision)
    found = violations_of(strategy, machine, config=mixture(kind, **sizes))
    assert len(found) == bool(words) and words in "".join(found), found
    assert not words or "model.architecture." in found[0]


def test_a_model_without_grouped_products_has_any_width() -> None:
    one = Machine("cpu", 1, precision="32-true")
    dense = AutoConfig.for_model("llama", hidden_size=50, num_attention_heads=5)
    assert not violations_of("auto", one, config=dense)
    eager = mixture(intermediate_size=22, experts_implementation="eager")
    assert not violations_of("auto", one, config=eager)
