"""Gradients that tensor-parallel plans forget; an axis that the library does not know: a class."""

from collections.abc import Iterator
from typing import Any

import pytest

from dist_template import InputError
from dist_template.cli.limits import Machine
from dist_template.parallel import mesh_sizes
from dist_template.parallel.estimates import estimate_of
from dist_template.parallel.estimates.facts import Facts, Sent
from dist_template.parallel.shard import STYLE, complete_plan
from dist_template.parallel.shrunk import shrunk
from tests.support.limits import violations_of
from tests.support.modules import on_meta
from tests.support.parity import MODELS, Trainings, assert_trains_alike
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
TRAINED = ["glm4_moe", "phi", "apertus"]
MODELS |= {kind: f"{BASE | KNOWN[kind][0] | {'model_type': kind}}" for kind in TRAINED}


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
    said = r"how the gradient of .*q_norm.weight is computed: .*give a rule as tp_plan"
    with pytest.raises(InputError, match=said):
        complete_plan(model, model.tp_plan)
    given = {f"{HEADS}.{name}": "replicate" for name in ("q_norm", "k_norm")}
    complete_plan(model, model.tp_plan | given)
    with pytest.raises(InputError, match="its plan leaves partial gradients"):
        unsound = build("longcat_flash", num_layers=1, num_key_value_heads=6)
        complete_plan(unsound, unsound.tp_plan)


@pytest.mark.slow
@pytest.mark.parametrize("model", tiers(TRAINED, daily=["glm4_moe"]))
def test_tensor_parallelism_trains_as_one_process(train: Trainings, model: str) -> None:
    assert_trains_alike(train(model, "tp"), train(model, "one"))


def test_a_tied_parameter_that_is_sharded_for_one_owner_alone_is_refused() -> None:
    """GPT-NeoX's plan shards the output layer and not the embedding that may share its weights."""
    model = build("gpt_neox", tie_word_embeddings=True)
    with pytest.raises(InputError, match="share a parameter, and the plan shards one of them"):
        complete_plan(model, model.tp_plan)


class MirrorAxis(mesh_sizes.Axis):
    """Ranks that repeat each other's work, and compare a checksum of their gradients."""

    name = "mirror"
    draws_own = False
    is_proven = False

    def buffers(self, facts: Facts) -> dict[str, float]:
        return {"checksums": 8.0 * facts.layers}

    def refusals(self, setup: Any) -> Iterator[str]:
        if self.size > 2:
            yield f"mirror_size {self.size}: two mirrors are enough"

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        yield Sent("all_reduce", facts.layers, 8, self.size, self.size)


MIRRORED = {"class_path": "MeshStrategy", "dict_kwargs": {"mirror_size": 4}}
FACTS = Facts(world_size=4, parameters=10**6, trainable=10**6, layers=8, global_batch_size=8)


@pytest.fixture
def mirrors() -> Iterator[None]:
    mesh_sizes.AXES.append(MirrorAxis)
    yield
    mesh_sizes.AXES.remove(MirrorAxis)


@pytest.mark.usefixtures("mirrors")
def test_a_new_axis_has_sizes_refusals_memory_messages_and_a_small_form() -> None:
    sharding: Any = estimate_of(MIRRORED)
    others = dict.fromkeys(("pp", "dp_replicate", "tp", "ep", "cp"), 1)
    assert sharding.sizes(8) == others | {"fsdp": 2, "mirror": 4}
    assert sharding.data_parallel(8) == 2 and sharding.axes(8) == ["fsdp"]
    assert violations_of(MIRRORED, Machine("cuda", 8)) == ["mirror_size 4: two mirrors are enough"]
    refused = violations_of(MIRRORED, Machine("cuda", 6))
    assert any("mirror_size 4 does not make 6" in each for each in refused)
    memory, alone = sharding.memory(FACTS), estimate_of("ddp").memory(FACTS)
    assert memory["weights"] == alone["weights"] and memory["checksums"] == 64
    sent = [one for one in sharding.traffic(FACTS) if one.size == 8]
    assert sent == [Sent("all_reduce", 8, 8, 4, 4)]
    small = shrunk(MIRRORED)
    assert (small.arguments["mirror_size"], small.processes, small.data_parallel) == (2, 4, 2)
    half = shrunk({**MIRRORED, "dict_kwargs": {"mirror_size": 2, "fsdp_size": 1}}, 1)
    assert (half.arguments["mirror_size"], half.processes) == (1, 1)
