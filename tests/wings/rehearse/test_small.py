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

SINGLE: Any = {"num_attention_heads": 8, "num_key_value_heads": 1}
SECOND: Any = {"moe_layers": [*range(1, 48, 2)]}
ROUTED = {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 2, "num_hidden_layers": 2}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
EVERY_SECOND = {"num_hidden_layers": 3, "moe_layers": [1, 2], "no_rope_layers": [1, 1, 0]}
ARCHITECTURES: list[Any] = [
    ("deepseek_v3", {}, ROUTED),
    ("mixtral", {}, {"num_local_experts": 4, "num_attention_heads": 4, "num_key_value_heads": 2}),
    ("gemma3_text", {}, SLIDING),
    ("gpt2", {}, {"n_layer": 2, "n_embd": 32, "n_head": 2, "tie_word_embeddings": True}),
    ("llama4_text", SECOND, EVERY_SECOND),  # layers 0, 1 and 3
    ("llama", SINGLE, {"num_key_value_heads": 1}),  # tensor parallelism cannot divide it
]


@pytest.mark.parametrize(("model_type", "given", "kept"), ARCHITECTURES)
def test_a_small_architecture_has_the_structure_of_the_large(
    model_type: str, given: Any, kept: dict[str, Any]
) -> None:
    small = shrink_model.shrink_architecture(AutoConfig.for_model(model_type, **given), seq_len=32)
    assert {name: small[name] for name in kept} == kept
    if not given:
        rebuilt = AutoConfig.for_model(**small)
        assert shrink_model.shrink_architecture(rebuilt, seq_len=32) == small, "as small as it gets"


NAMES = ("fsdp_size", "dp_replicate_size", "tp_size", "ep_size")
MESHES: list[Any] = [  # fsdp, replicas, tp, ep; pp: what it becomes, and its processes
    (("auto", 1, 8, 8), 1, ("auto", 1, 2, 2), 4),
    ((64, 1, 1, 16), 1, (2, 1, 1, 2), 2),
    ((8, 2, 1, 2), 1, (2, 2, 1, 2), 4),
    ((8, "auto", 1, 1), 1, (2, "auto", 1, 1), 4),
    ((8, 4, 2, 1), 1, (2, 1, 2, 1), 4),
    ((1, 1, 1, 1), 8, (1, 1, 1, 1), 2),
    (("auto", 1, 1, 8), 4, ("auto", 1, 1, 2), 4),
    ((8, 1, 2, 2), 4, (1, 1, 2, 2), 4),
    ((8, "auto", 8, 1), 2, (1, 1, 2, 1), 4),
]


@pytest.mark.parametrize(("sizes", "pp", "expected", "processes"), MESHES)
def test_a_mesh_shrinks_to_two_by_two(sizes: Any, pp: int, expected: Any, processes: int) -> None:
    given = dict(zip(NAMES, sizes, strict=True))
    strategy = MeshStrategy(**given, pp_size=pp)
    small = shrunk(strategy)
    assert tuple(small.arguments[name] for name in NAMES) == expected
    assert small.arguments["pp_size"] == min(2, pp), "a pipeline stays one, of 2 ranks"
    dropped = sorted(name for name in NAMES[:2] if small.arguments[name] == 1 != given[name])
    notes = [f"{name} is 1: the mesh would need more processes" for name in dropped]
    assert sorted(small.notes) == notes
    assert small.processes == processes
    assert strategy.arguments["tp_size"] == given["tp_size"], "the real strategy is not touched"


def test_a_deepspeed_file_shrinks_too() -> None:
    zero: Any = {"stage": 3, "stage3_param_persistence_threshold": 100_000}
    zero["offload_param"] = {"device": "nvme"}
    config = {"train_batch_size": 256, "bf16": {"enabled": True}, "gradient_clipping": 1.0}
    config["zero_optimization"] = zero
    small = shrunk({"class_path": "ZeroStrategy", "init_args": {"config": config}})
    assert small.processes == 2
    zero = zero | {"stage3_param_persistence_threshold": 64, "offload_param": {"device": "cpu"}}
    assert small.arguments["config"] == {"gradient_clipping": 1.0, "zero_optimization": zero}
    assert config["train_batch_size"] == 256, "what was given is not touched"


DATA = {"seq_len": 2048, "global_batch_size": 256, "micro_batch_size": 4}
DATA |= {"source": None, "tokenizer": None}


def shrunk_config(strategy: MeshStrategy, architecture: Any, folder: Path, **more: Any) -> Any:
    spec = {"class_path": "MeshStrategy", "init_args": {**strategy.arguments}}
    given = {"run": {}, "trainer": {"strategy": spec}, "data": DATA, "model": {}, **more}
    return shrink(given, architecture, folder)


def test_data_and_checkpoints_shrink_and_nothing_given_is_touched(tmp_path: Path) -> None:
    saves = {"dirpath": "/scratch/pretrain", "every_n_steps": 1000, "keep": 2, "asynchronous": True}
    strategy = MeshStrategy(fsdp_size=8, tp_size=8, ep_size=8)
    small = shrunk_config(strategy, None, tmp_path, last_checkpoint=saves)
    assert (small.processes, small.data_parallel) == (4, 2)
    assert small.config["data"]["global_batch_size"] == 8  # 2 sequences x 2 ranks x 2 accumulated
    saves = {"dirpath": "{run}/checkpoints", "every_n_steps": 2, "keep": 6, "asynchronous": False}
    assert small.config["last_checkpoint"] == saves, "nothing goes into the production run's folder"
    assert DATA["seq_len"] == 2048, "what was given is not touched"


INTERLEAVED = {"pp_schedule": "Interleaved1F1B"}
PIPELINES: list[Any] = [
    ({"pp_schedule": "1F1B", "pp_layers": [3, 3, 3, 3]}, 2, {"pp_layers": "even"}),
    (INTERLEAVED | {"pp_stages_per_rank": 3}, 4, {"pp_stages_per_rank": 2}),
    (INTERLEAVED, 4, {"pp_layers": "cost"}),
]


@pytest.mark.parametrize(("keys", "blocks", "kept"), PIPELINES)
def test_a_small_pipeline_has_a_block_and_a_micro_batch_for_each_stage(
    keys: dict[str, Any], blocks: int, kept: dict[str, Any], tmp_path: Path
) -> None:
    llama = AutoConfig.for_model("llama", num_hidden_layers=12)
    strategy = MeshStrategy(pp_size=4, fsdp_size=1, **keys)
    small = shrunk_config(strategy, llama, tmp_path)
    assert small.config["model"]["architecture"]["num_hidden_layers"] == blocks
    assert small.config["data"]["global_batch_size"] == 2 * blocks
    assert (small.processes, small.data_parallel) == (2, 1)
    options = small.config["trainer"]["strategy"]["init_args"]
    expected = kept | {"pp_schedule": keys["pp_schedule"]}
    assert {name: options[name] for name in expected} == expected
