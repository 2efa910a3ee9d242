"""What cannot work together is refused before anything starts; what works is not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from trainer_dev.data import DataModule
from trainer_dev.module import LanguageModule
from transformers import AutoConfig

from dist_template import BlockConfig, OptimConfig
from dist_template.strategies import MeshStrategy, ZeroStrategy
from tests.support.library import Machine, violations
from tests.support.limits import LLAMA, violations_of
from tests.support.strategies import NAMES, settings_of

DEEPSEEK = AutoConfig.for_model("deepseek_v3")  # as published: 128 heads, 256 experts
DENSE_WITHOUT_PLAN = AutoConfig.for_model("gpt2", tie_word_embeddings=False)


def mesh(**sizes: Any) -> dict[str, Any]:
    return {"strategy": MeshStrategy(**sizes)}


def zero(**options: Any) -> dict[str, Any]:
    return {"strategy": ZeroStrategy(**options)}


FAST_FP64 = Machine("cuda", 8, precision="64-true")
IMPOSSIBLE: dict[str, tuple[Mapping[str, Any], str]] = {
    "sizes that do not make the processes": (mesh(fsdp_size=3), "fsdp_size 3 .* does not make 8"),
    "sizes that cannot": (mesh(tp_size=3), "tp_size 3 does not make 8"),
    "two sizes left open": (mesh(dp_replicate_size="auto"), "only one size can be auto"),
    "no process at all": (mesh(fsdp_size=-4, tp_size=-2), "fsdp_size -4 .* does not make 8"),
    "experts over a part of a tensor":
        ({**mesh(tp_size=4, ep_size=2), "config": DEEPSEEK},
        "ep_size 2 must be a multiple of tp_size 4"),
    "experts over more than there are":
        ({**mesh(ep_size=16), "config": DEEPSEEK},
        "ep_size 16 must .* divide fsdp_size 8 x tp_size 1 = 8"),
    "experts over replicas": ({**mesh(dp_replicate_size=2, ep_size=8), "config": DEEPSEEK},
        "ep_size 8 must .* divide fsdp_size 4"),
    "offload of what is not sharded":
        ({**mesh(fsdp_size=1, tp_size=8, cpu_offload=True), "config": DEEPSEEK},
        "cpu_offload true needs parameters that FSDP shards"),
    "key and value heads": (mesh(tp_size=8),
        "num_key_value_heads 4 is not a multiple of tp_size 8"),
    "heads": ({**mesh(tp_size=8), "config": AutoConfig.for_model("llama", num_attention_heads=12,
        hidden_size=768)}, "num_attention_heads 12 is not a multiple of tp_size 8"),
    "selective checkpointing with expert parallelism":
        ({**mesh(ep_size=8), "config": DEEPSEEK, "module": LanguageModule(blocks=BlockConfig(
        "selective"))}, "'selective' does not work with ep_size > 1"),
    "selective checkpointing with sharded parameters":
        ({**zero(stage=3), "module": LanguageModule(blocks=BlockConfig("selective"))},
        "'selective' does not work with ZeRO stage 3"),
    "experts": ({**mesh(ep_size=8), "config": AutoConfig.for_model("deepseek_v3",
        n_routed_experts=12)}, "n_routed_experts 12 is not a multiple of ep_size 8"),
    "experts, by another name": ({**mesh(ep_size=8), "config": AutoConfig.for_model("mixtral",
        num_local_experts=6)}, "num_local_experts 6 is not a multiple of ep_size 8"),
    "expert parallelism of a dense model":
        (mesh(ep_size=2), "llama has no plan for expert parallelism"),
    "tensor parallelism without a plan":
        ({**mesh(tp_size=2), "config": DENSE_WITHOUT_PLAN},
        "gpt2 has no plan for tensor parallelism; .*tp_plan"),
    "a plan that is turned off": ({**mesh(tp_size=2, tp_plan={}), "config": DEEPSEEK},
        "no plan for tensor"),
    "tensor parallelism of an own model":
        ({**mesh(tp_size=2), "config": None}, "another library has no plan"),
    "half precision on a mesh": ({**mesh(), "machine": Machine("cuda", 8, precision="16-mixed")},
        "precision '16-mixed' does not exist under MeshStrategy: set 32-true"),
    "half precision on a CPU": ({"machine": Machine("cpu", 8, precision="16-mixed")},
        "'16-mixed' does not exist on a CPU: set bf16-mixed or 32-true"),
    "double precision on a mesh": ({**mesh(), "machine": FAST_FP64},
        "'64-true' does not exist under MeshStrategy"),
    "double precision in ZeRO": ({**zero(), "machine": FAST_FP64},
        "'64-true' does not exist under ZeroStrategy"),
    "clipping by value in ZeRO": ({**zero(), "gradient_clip_algorithm": "value"},
        "DeepSpeed clips by norm only"),
    "parameters offloaded, not sharded":
        (zero(config={"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}),
        "offload_parameters needs ZeRO stage 3, .* the stage is 2"),
    "a DeepSpeed file with another batch":
        (zero(config={"train_micro_batch_size_per_gpu": 7, "zero_optimization": {"stage": 2}}),
        "train_micro_batch_size_per_gpu 7, and trainer and data 1"),
    "a DeepSpeed file with another precision":
        (zero(config={"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}),
        "fp16.enabled true, and trainer and data false"),
    "Lightning's FSDP": ({"strategy": FSDPStrategy()}, "'FSDPStrategy' is replaced: .*fsdp2.yaml"),
    "Lightning's FSDP by name": ({"strategy": "fsdp_cpu_offload"}, "replaced: .*fsdp2.yaml"),
    "Lightning's FSDP2": ({"strategy": ModelParallelStrategy()}, "replaced: .*fsdp2_tp.yaml"),
    "Lightning's DeepSpeed": ({"strategy": DeepSpeedStrategy()}, "replaced: .*zero3.yaml"),
    "Lightning's DeepSpeed by name": ({"strategy": "deepspeed_stage_2"}, "replaced: .*zero2.yaml"),
    "processes that are forked": ({"strategy": "ddp_fork"},
        "'ddp_fork' is not supported, .* set ddp"),
    "a given accumulation": ({"accumulate_grad_batches": 4},
        "accumulate_grad_batches 4 .*: it is derived"),
    "a second sampler": ({"use_distributed_sampler": True}, "use_distributed_sampler true"),
    "a batch that does not divide":
        ({"data": DataModule(global_batch_size=12, micro_batch_size=1)},
        "global_batch_size 12 is not a multiple of micro_batch_size 1 x data_parallel 8"),
    "a batch that does not divide over replicas of shards":
        ({**mesh(dp_replicate_size=2, tp_size=2), "data": DataModule(global_batch_size=6,
        micro_batch_size=1)},
        "global_batch_size 6 is not a multiple of micro_batch_size 1 x data_parallel 4"),
    "a learning rate below zero": ({"module": LanguageModule(optim=OptimConfig(
        learning_rate=-1.0))}, "model.optim: Invalid learning rate: -1.0"),
    "warm-up longer than training":
        ({"module": LanguageModule(optim=OptimConfig(warmup=1000))},
        "warm-up of 1000 steps is not shorter than training"),
    "a cosine without an end": ({"max_steps": -1, "max_epochs": -1},
        "'cosine' .* needs to know how long"),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_the_impossible_is_refused_in_one_sentence(case: str) -> None:
    given, fragment = IMPOSSIBLE[case]
    (sentence,) = violations_of(**given)
    assert re.search(fragment, sentence), sentence
    assert "\n" not in sentence and not sentence.endswith(".")


def from_file(name: str) -> Any:
    """A strategy by its name."""
    strategy = settings_of(name)
    if isinstance(strategy, str):
        return strategy
    return {"MeshStrategy": MeshStrategy, "ZeroStrategy": ZeroStrategy}[strategy["class_path"]](
        **strategy["init_args"]
    )


FOUR_KEY_HEADS_AT_MOST = {
    ("tp", 8),
    ("tp", 64),
}  # Llama's tp_size is all processes, and its keys have 4 heads here


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_strategy_fits_every_machine_that_its_sizes_divide(
    name: str, world_size: int
) -> None:
    machine = Machine("cuda", min(world_size, 8), max(1, world_size // 8), "bf16-mixed")
    least = {"pp_ep": 4} | dict.fromkeys(
        ("cp", "hsdp", "fsdp2_tp", "fsdp2_ep", "fsdp2_tp_ep", "pp", "pp_fsdp2"), 2
    )
    too_small = world_size < least.get(name, 1)
    deepseek = violations_of(from_file(name), machine, config=DEEPSEEK)
    llama = violations_of(from_file(name), machine, config=LLAMA)
    assert bool(deepseek) == too_small, deepseek
    assert bool(llama) == (
        too_small or "ep" in name.split("_") or (name, world_size) in FOUR_KEY_HEADS_AT_MOST
    ), llama


POSSIBLE: dict[str, Mapping[str, Any]] = {
    "clipping by value on a mesh": {**mesh(tp_size=2), "gradient_clip_algorithm": "value"},
    "tensor parallelism across nodes": {
        **mesh(tp_size="auto", fsdp_size=1),
        "machine": Machine("cuda", 2, 2),
    },
    "replicas across nodes": {**mesh(dp_replicate_size=4), "machine": Machine("cuda", 8, 2)},
    "odd heads where attention is unsharded": {
        **mesh(tp_size=2),
        "config": AutoConfig.for_model("deepseek_v3", num_attention_heads=3),
    },
    "a model without plans, sharded": {**mesh(), "config": DENSE_WITHOUT_PLAN},
    "an own model, sharded": {**mesh(), "config": None},
    "an own plan": {
        **mesh(tp_size=2, tp_plan={"transformer.h.*.mlp": "replicate"}),
        "config": DENSE_WITHOUT_PLAN,
    },
    "all experts apart": {**mesh(ep_size="auto"), "config": DEEPSEEK},
    "half precision under DDP": {"machine": Machine("cuda", 8, precision="16-mixed")},
    "training by epochs": {"max_steps": -1, "max_epochs": 3},
    "training by time": {
        "max_steps": -1,
        "max_time": "00:01:00:00",
        "module": LanguageModule(optim=OptimConfig(schedule="constant", warmup=10)),
    },  # fmt: skip
    "validation after the end": {"val_check_interval": 2000},
    "another machine's disk": zero(
        stage=3, offload_optimizer=True, offload_optimizer_device="nvme"
    ),
}


@pytest.mark.parametrize("case", POSSIBLE)
def test_the_merely_unusual_is_not_refused(case: str) -> None:
    assert violations_of(**POSSIBLE[case]) == []


def test_evaluation_needs_no_batch_that_divides_and_no_schedule() -> None:
    trainer = {"strategy": "ddp", "max_steps": 1}
    data, module = DataModule(global_batch_size=12), LanguageModule(optim=OptimConfig(warmup=1000))
    machine = Machine("cuda", 8)
    assert len(violations(machine, trainer, module, data, LLAMA)) == 2
    assert violations(machine, trainer, module, data, LLAMA, trains=False) == []
