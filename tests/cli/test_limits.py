"""What cannot work together is refused before anything starts; what works is not."""

import re
from typing import Any

import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from trainer_dev.data import DataModule
from trainer_dev.module import LanguageModule
from transformers import AutoConfig

from dist_template import AdapterConfig, BlockConfig, OptimConfig
from dist_template.cli.limits import Machine, violations
from dist_template.parallel.mesh.pipeline.schedule import SCHEDULES
from dist_template.strategies import MeshStrategy, ZeroStrategy
from dist_template.text import Preferences
from tests.support.limits import LLAMA, violations_of
from tests.support.strategies import NAMES, settings_of

DEEPSEEK = AutoConfig.for_model("deepseek_v3")  # as published: 128 heads, 256 experts
NO_PLAN = AutoConfig.for_model("gpt2", tie_word_embeddings=False)
OTHERS = {"module", "machine", "data", "gradient_clip_algorithm"}  # not a strategy's arguments


def with_strategy(kind: Any, given: dict[str, Any]) -> dict[str, Any]:
    others = {name: given.pop(name) for name in OTHERS & given.keys()}
    return {"strategy": kind(**given), **others}


def mesh(config: Any = LLAMA, **given: Any) -> dict[str, Any]:
    return with_strategy(MeshStrategy, given) | {"config": config}


def zero(**given: Any) -> dict[str, Any]:
    return with_strategy(ZeroStrategy, given)


def pipeline(rows: int = 1024, **given: Any) -> dict[str, Any]:
    """2 ranks, and 4 data-parallel ranks."""
    data = DataModule(global_batch_size=rows, micro_batch_size=1)
    return {"data": data, **mesh(**given, pp_size=2)}


def module(**given: Any) -> dict[str, Any]:
    return {"module": LanguageModule(optim=OptimConfig(**given))}


AutoModel = AutoConfig.for_model
HEADS_12 = AutoModel("llama", num_attention_heads=12, hidden_size=768)
FP64, FP16 = (Machine("cuda", 8, precision=name) for name in ("64-true", "16-mixed"))
SELECTIVE = LanguageModule(blocks=BlockConfig("selective"))
COMPILED = LanguageModule(blocks=BlockConfig(compile=True))
ROWS_12, ROWS_6 = (DataModule(global_batch_size=n, micro_batch_size=1) for n in (12, 6))
OFFLOAD = {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
BATCH = {"train_micro_batch_size_per_gpu": 7, "zero_optimization": {"stage": 2}}
HALF = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}
NF4 = LanguageModule(adapter=AdapterConfig(quantize="nf4"))
PAIRS = DataModule(Preferences(paths=["pairs.jsonl"]), global_batch_size=1024, micro_batch_size=1)
ROUNDS: Any = {"pp_schedule": "Interleaved1F1B"}
ZERO_BUBBLE: Any = {"pp_schedule": "InterleavedZeroBubble"}
DUAL: Any = {"pp_schedule": "DualPipeV"}
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    (mesh(fsdp_size=3), "fsdp_size 3 .* does not make 8"),
    (mesh(dp_replicate_size="auto"), "only one size can be auto"),
    (mesh(fsdp_size=-4, tp_size=-2), "fsdp_size -4 .* does not make 8"),
    (mesh(tp_size=4, ep_size=2, config=DEEPSEEK), "ep_size 2 must be a multiple of tp_size 4"),
    (mesh(ep_size=16, config=DEEPSEEK), "ep_size 16 must .* divide fsdp_size 8 x tp_size 1 = 8"),
    (mesh(dp_replicate_size=2, ep_size=8, config=DEEPSEEK), "ep_size 8 must .* divide fsdp_size 4"),
    (mesh(fsdp_size=1, tp_size=8, cpu_offload=True, config=DEEPSEEK), "cpu_offload true needs par"),
    (mesh(tp_size=8), "num_key_value_heads 4 is not a multiple of tp_size 8"),
    (mesh(tp_size=8, config=HEADS_12), "num_attention_heads 12 is not a multiple of tp_size 8"),
    (mesh(ep_size=8, config=DEEPSEEK, module=SELECTIVE), "'selective' does not work with ep_size"),
    (zero(stage=3, module=SELECTIVE), "'selective' does not work with ZeRO stage 3"),
    (
        mesh(ep_size=8, config=AutoModel("deepseek_v3", n_routed_experts=12)),
        "n_routed_experts 12 is not a multiple of ep_size 8",
    ),
    (mesh(ep_size=8, config=AutoModel("mixtral", num_local_experts=6)), "local_experts 6 is not"),
    (mesh(ep_size=2), "llama has no plan for expert parallelism"),
    (mesh(tp_size=2, config=NO_PLAN), "gpt2 has no plan for tensor parallelism; .*tp_plan"),
    (mesh(tp_size=2, tp_plan={}, config=DEEPSEEK), "no plan for tensor"),
    (mesh(tp_size=2, config=None), "another library has no plan"),
    (mesh(machine=FP16), "precision '16-mixed' does not exist under MeshStrategy: set 32-true"),
    ({"machine": Machine("cpu", 8, precision="16-mixed")}, "'16-mixed' does not exist on a CPU"),
    (zero(machine=FP64), "'64-true' does not exist under ZeroStrategy"),
    (zero(gradient_clip_algorithm="value"), "DeepSpeed clips by norm only"),
    (zero(config=OFFLOAD), "offload_param needs ZeRO stage 3, .* the stage is 2"),
    (zero(config=BATCH), "train_micro_batch_size_per_gpu 7, and trainer and data 1"),
    (zero(config=HALF), "fp16.enabled true, and trainer and data false"),
    ({"strategy": FSDPStrategy()}, "'FSDPStrategy' is replaced: .*fsdp2"),
    ({"strategy": "fsdp_cpu_offload"}, "replaced: .*fsdp2"),
    ({"strategy": ModelParallelStrategy()}, "replaced: .*fsdp2_tp"),
    ({"strategy": DeepSpeedStrategy()}, "replaced: .*zero3"),
    ({"strategy": "ddp_fork"}, "'ddp_fork' is not supported, .* set ddp"),
    ({"data": ROWS_12}, "12 is not a multiple of data.micro_batch_size 1 x data_parallel 8"),
    (mesh(dp_replicate_size=2, tp_size=2, data=ROWS_6), "6 is not .* 1 x data_parallel 4"),
    (module(eps=-1.0), "model.optim: Invalid epsilon value: -1.0"),
    (module(warmup=1000), "warm-up of 1000 steps is not shorter than training"),
    ({"max_steps": -1, "max_epochs": -1}, "'cosine' .* needs to know how long"),
    (pipeline(rows=4), "has 1 micro-batches .* 1F1B needs 2 or more, one for each stage: edit"),
    (pipeline(rows=20, **ROUNDS), "has 5 micro-batches .* Interleaved1F1B needs a multiple of 2:"),
    (
        pipeline(config=AutoModel("llama", num_hidden_layers=3), **ROUNDS),
        "3 blocks cannot be divided into 4 stages: lower .*pp_size, or",
    ),
    (
        pipeline(rows=20, **ZERO_BUBBLE),
        "5 micro-batches .* InterleavedZeroBubble needs a multiple of",
    ),
    (pipeline(rows=8, **DUAL), "has 2 micro-batches .* DualPipeV needs 4 or more, one for each st"),
    (pipeline(**ZERO_BUBBLE, pp_stages_per_rank=1), "per_rank 1: InterleavedZeroBubble needs 2 or"),
    (
        pipeline(**DUAL, module=SELECTIVE),
        "selective does not work with pp_schedule DualPipeV, .*full",
    ),
    (
        pipeline(**DUAL, module=COMPILED),
        "compile true does not work with pp_schedule DualPipeV, wh",
    ),
    (pipeline(pp_layers=[10, 12]), r"pp_layers \[10, 12\] sums to 22: give 2 .* model's 32 blocks"),
    (
        pipeline(pp_layers=[32, 0]),
        r"pp_layers \[32, 0\] gives a stage 0 blocks: give 2 numbers of 1",
    ),
    (pipeline(pp_layers=[10, 10, 12]), "pp_layers .* has 3 numbers: give 2 numbers .* or even"),
    (pipeline(pp_layers=[16, 16], **DUAL), "pp_layers .* has 2 numbers: give 4 numbers"),
    (pipeline(cpu_offload=True), "cpu_offload true does not work in a pipeline: set it to false"),
    (
        pipeline(module=NF4),
        "adapter.quantize does not work in a pipeline: set it to null, or .*pp_",
    ),
    (pipeline(data=PAIRS), "Preferences does not work in a pipeline: set .*pp_size to 1"),
]


@pytest.mark.parametrize(("given", "words"), IMPOSSIBLE, ids=[words for _, words in IMPOSSIBLE])
def test_the_impossible_is_refused_in_one_sentence(given: dict[str, Any], words: str) -> None:
    (sentence,) = violations_of(**given)
    assert re.search(words, sentence), sentence
    assert "\n" not in sentence and not sentence.endswith(".")


def from_file(name: str) -> Any:
    strategy = settings_of(name)
    kinds: Any = {"MeshStrategy": MeshStrategy, "ZeroStrategy": ZeroStrategy}
    if isinstance(strategy, str):
        return strategy
    return kinds[strategy["class_path"]](**strategy["init_args"])


AT_LEAST_2 = ("cp", "hsdp", "fsdp2_tp", "fsdp2_ep", "fsdp2_tp_ep", "pp", "pp_fsdp2")
TOO_MANY = {("tp", 8), ("tp", 64)}  # tp_size is all processes, and Llama's keys have 4 heads here


@pytest.mark.parametrize("world_size", [1, 2, 8, 64])
@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_strategy_fits_each_machine_its_sizes_divide(name: str, world_size: int) -> None:
    machine = Machine("cuda", min(world_size, 8), max(1, world_size // 8), "bf16-mixed")
    too_small = world_size < ({"pp_ep": 4} | dict.fromkeys(AT_LEAST_2, 2)).get(name, 1)
    deepseek = violations_of(from_file(name), machine, config=DEEPSEEK)
    llama = violations_of(from_file(name), machine, config=LLAMA)
    assert bool(deepseek) == too_small, deepseek
    for_experts = "ep" in name.split("_")
    assert bool(llama) == (too_small or for_experts or (name, world_size) in TOO_MANY), llama


PLAN = {"transformer.h.*.mlp": "replicate"}
POSSIBLE: list[dict[str, Any]] = [
    mesh(tp_size=2, gradient_clip_algorithm="value"),
    mesh(tp_size="auto", fsdp_size=1, machine=Machine("cuda", 2, 2)),
    mesh(dp_replicate_size=4, machine=Machine("cuda", 8, 2)),
    mesh(tp_size=2, config=AutoModel("deepseek_v3", num_attention_heads=3)),  # unsharded attention
    mesh(config=NO_PLAN),
    mesh(config=None),  # an own model
    mesh(tp_size=2, tp_plan=PLAN, config=NO_PLAN),
    mesh(ep_size="auto", config=DEEPSEEK),
    *(pipeline(rows=16, pp_schedule=schedule) for schedule in SCHEDULES),
    pipeline(rows=4, pp_schedule="GPipe"),
    pipeline(rows=4, pp_schedule="ZBVZeroBubble"),
    pipeline(pp_layers=[20, 12]),
    pipeline(rows=16, pp_layers=[8, 8, 10, 6], **DUAL),
    {"machine": FP16},
    {"max_steps": -1, "max_epochs": 3},
    {"max_steps": -1, "max_time": "00:01:00:00", **module(schedule="constant", warmup=10)},
    {"val_check_interval": 2000},  # after the end
    zero(stage=3, offload_optimizer=True, offload_optimizer_device="nvme"),  # another machine's
]


@pytest.mark.parametrize("given", POSSIBLE)
def test_the_merely_unusual_is_not_refused(given: dict[str, Any]) -> None:
    assert violations_of(**given) == []


def test_evaluation_needs_no_batch_that_divides_and_no_schedule() -> None:
    trainer: Any = {"strategy": "ddp", "max_steps": 1}
    given: Any = [Machine("cuda", 8), trainer, *module(warmup=1000).values()]
    given += [DataModule(global_batch_size=12), LLAMA]
    assert len(violations(*given)) == 2
    assert violations(*given, trains=False) == []
