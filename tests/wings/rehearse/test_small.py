"""The small configuration that `rehearse` makes of a large one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from dist_template.parallel.shrunk import shrunk
from dist_template.strategies import MeshStrategy
from dist_template.wings.rehearse import shrink_model
from dist_template.wings.rehearse.shrink_config import shrink


@pytest.mark.parametrize(
    ("model_type", "kept"),
    [
        (
            "deepseek_v3",
            {
                "first_k_dense_replace": 1,
                "n_routed_experts": 4,
                "n_group": 2,
                "num_hidden_layers": 2,
            },
        ),
        ("mixtral", {"num_local_experts": 4, "num_attention_heads": 4, "num_key_value_heads": 2}),
        (
            "gemma3_text",
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
        ),
        ("gpt2", {"n_layer": 2, "n_embd": 32, "n_head": 2, "tie_word_embeddings": True}),
        ("llama4_text", {"num_hidden_layers": 2, "moe_layers": [0, 1], "no_rope_layers": [1, 0]}),
    ],
)
def test_a_small_architecture_has_the_structure_of_the_large(
    model_type: str, kept: dict[str, Any]
) -> None:
    small = shrink_model.shrink_architecture(AutoConfig.for_model(model_type), seq_len=32)
    assert {name: small[name] for name in kept} == kept
    rebuilt = AutoConfig.for_model(**small)
    assert (
        shrink_model.shrink_architecture(rebuilt, seq_len=32) == small
    )  # it is as small as it gets


def test_a_list_of_layers_is_renumbered() -> None:
    every_second = AutoConfig.for_model("llama4_text", moe_layers=[*range(1, 48, 2)])
    small = shrink_model.shrink_architecture(every_second, 32)
    kept = {
        "num_hidden_layers": 3,
        "moe_layers": [1, 2],
        "no_rope_layers": [1, 1, 0],
    }  # layers 0, 1 and 3
    assert {name: small[name] for name in kept} == kept


def test_heads_that_tensor_parallelism_cannot_divide_stay_so() -> None:
    config = AutoConfig.for_model("llama", num_attention_heads=8, num_key_value_heads=1)
    assert shrink_model.shrink_architecture(config, 32)["num_key_value_heads"] == 1


def spec_of(strategy: MeshStrategy) -> dict[str, Any]:
    """A strategy's configuration, as far as its mesh goes."""
    return {"class_path": "MeshStrategy", "init_args": {**strategy.arguments}}


@pytest.mark.parametrize(
    ("sizes", "expected", "processes"),
    [
        ({"fsdp_size": "auto", "tp_size": 8, "ep_size": 8}, ("auto", 1, 2, 2), 4),
        ({"fsdp_size": 64, "ep_size": 16}, (2, 1, 1, 2), 2),
        ({"fsdp_size": "auto", "ep_size": 2}, ("auto", 1, 1, 2), 2),
        ({"fsdp_size": 8, "ep_size": 8}, (2, 1, 1, 2), 2),
        ({"fsdp_size": 8, "dp_replicate_size": 2, "ep_size": 2}, (2, 2, 1, 2), 4),
        ({"fsdp_size": 8, "dp_replicate_size": "auto"}, (2, "auto", 1, 1), 4),
        ({"fsdp_size": 8, "dp_replicate_size": 4, "tp_size": 2}, (2, 1, 2, 1), 4),
        ({"pp_size": 8, "fsdp_size": 1}, (1, 1, 1, 1), 2),
        ({"pp_size": 4, "fsdp_size": "auto"}, ("auto", 1, 1, 1), 4),
        ({"pp_size": 4, "fsdp_size": "auto", "ep_size": 8}, ("auto", 1, 1, 2), 4),
        ({"pp_size": 4, "fsdp_size": 8, "tp_size": 2, "ep_size": 2}, (1, 1, 2, 2), 4),
        ({"pp_size": 2, "fsdp_size": 8, "dp_replicate_size": 4}, (2, 1, 1, 1), 4),
        (
            {"pp_size": 2, "fsdp_size": 8, "dp_replicate_size": "auto", "tp_size": 8},
            (1, 1, 2, 1),
            4,
        ),
    ],
)
def test_a_mesh_shrinks_to_two_by_two(
    sizes: dict[str, Any], expected: tuple, processes: int
) -> None:
    strategy = MeshStrategy(**sizes)
    names = ("fsdp_size", "dp_replicate_size", "tp_size", "ep_size")
    small = shrunk(strategy)
    assert tuple(small.arguments[name] for name in names) == expected
    assert small.arguments["pp_size"] == min(2, sizes.get("pp_size", 1)), (
        "a pipeline stays one, of 2 ranks"
    )
    dropped = [name for name in names[:2] if small.arguments[name] == 1 != sizes.get(name, 1)]
    assert sorted(small.notes) == [
        f"{name} is 1: the mesh would need more processes" for name in sorted(dropped)
    ]
    assert small.processes == processes
    assert strategy.arguments["tp_size"] == sizes.get("tp_size", 1), (
        "the real strategy is not touched"
    )


def test_a_deepspeed_file_shrinks_too() -> None:
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 100_000,
        "offload_param": {"device": "nvme"},
    }
    config = {
        "train_batch_size": 256,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
    }
    spec = {"class_path": "ZeroStrategy", "init_args": {"config": config}}
    small = shrunk(spec)
    assert small.processes == 2
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 64,
        "offload_param": {"device": "cpu"},
    }
    assert small.arguments["config"] == {"gradient_clipping": 1.0, "zero_optimization": zero}
    assert spec["init_args"]["config"]["train_batch_size"] == 256, "what was given is not touched"


def test_data_and_checkpoints_shrink_and_nothing_given_is_touched(tmp_path: Path) -> None:
    strategy = MeshStrategy(fsdp_size=8, tp_size=8, ep_size=8)
    spec = spec_of(strategy)
    data = {
        "seq_len": 2048,
        "global_batch_size": 256,
        "micro_batch_size": 4,
        "source": None,
        "tokenizer": None,
    }
    saves = {"dirpath": "/scratch/pretrain", "every_n_steps": 1000, "keep": 2, "asynchronous": True}
    given = {
        "run": {},
        "trainer": {"strategy": spec},
        "data": data,
        "model": {},
        "last_checkpoint": saves,
    }
    small = shrink(given, None, tmp_path)
    assert (small.processes, small.data_parallel) == (4, 2)
    assert small.config["data"]["global_batch_size"] == 8  # 2 sequences x 2 ranks x 2 accumulated
    saves = {"dirpath": "{run}/checkpoints", "every_n_steps": 2, "keep": 6, "asynchronous": False}
    assert small.config["last_checkpoint"] == saves, (
        "nothing is written into the production run's folder"
    )
    assert given["data"]["seq_len"] == 2048, "what was given is not touched"


@pytest.mark.parametrize(
    ("keys", "blocks", "kept"),
    [
        ({"pp_schedule": "1F1B", "pp_layers": [3, 3, 3, 3]}, 2, {"pp_layers": "even"}),
        ({"pp_schedule": "Interleaved1F1B", "pp_stages_per_rank": 3}, 4, {"pp_stages_per_rank": 2}),
        ({"pp_schedule": "Interleaved1F1B"}, 4, {"pp_layers": "cost"}),
    ],
)
def test_a_small_pipeline_has_a_block_and_a_micro_batch_for_each_stage(
    keys: dict[str, Any], blocks: int, kept: dict[str, Any], tmp_path: Path
) -> None:
    strategy = MeshStrategy(pp_size=4, fsdp_size=1, **keys)
    data = {
        "seq_len": 2048,
        "global_batch_size": 256,
        "micro_batch_size": 4,
        "source": None,
        "tokenizer": None,
    }
    given = {"run": {}, "trainer": {"strategy": spec_of(strategy)}, "data": data, "model": {}}
    small = shrink(given, AutoConfig.for_model("llama", num_hidden_layers=12), tmp_path)
    assert small.config["model"]["architecture"]["num_hidden_layers"] == blocks
    assert small.config["data"]["global_batch_size"] == 2 * blocks
    assert (small.processes, small.data_parallel) == (2, 1)
    options = small.config["trainer"]["strategy"]["init_args"]
    assert {name: options[name] for name in kept} == kept and options["pp_schedule"] == keys[
        "pp_schedule"
    ]
