"""DeepSpeed's JSON in its published forms: each starts, or is refused in a sentence before that.

The forms are those of the documentation of DeepSpeed, transformers, accelerate and Lightning, and
of the trainers that ship files (axolotl, LLaMA-Factory, OpenRLHF, DeepSpeed-Chat), shortened."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dist_template import InputError
from dist_template.parallel.zero import check as deepspeed_check
from dist_template.parallel.zero import json as deepspeed_config
from dist_template.parallel.zero.strategy import ZeroStrategy
from tests.support.runs import refused, run
from tests.support.tiers import tiers

Config = dict[str, Any]
CPU: Config = {"device": "cpu", "pin_memory": True}
AUTO_SIZES: Config = dict.fromkeys(
    """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
    gradient_clipping""".split(),
    "auto",
)
SCALED: Config = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2}
SCALED |= {"initial_scale_power": 16, "min_loss_scale": 1}
ADAMW: Config = {
    "type": "AdamW",
    "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
}
WARMUP: Config = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
DECAY: Config = {"type": "WarmupDecayLR", "params": WARMUP | {"total_num_steps": "auto"}}
BUCKETS: Config = {"allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True}
BUCKETS |= {"reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True}
STAGE_3: Config = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
}
STAGE_3 |= {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
STAGE_3 |= {"stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9}
STAGE_3 |= {"stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True}
AXOLOTL: Config = STAGE_3 | dict.fromkeys(
    ("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"), 0
)
RLHF: Config = {"stage": 3, "offload_param": {"device": "none"}, "zero_quantized_weights": False}
RLHF |= dict.fromkeys(
    """sub_group_size stage3_max_live_parameters stage3_max_reuse_distance
    stage3_param_persistence_threshold stage3_prefetch_bucket_size reduce_bucket_size""".split(),
    "auto",
)
CHAT: Config = {
    "stage": 2,
    "offload_param": {"device": "none"},
    "offload_optimizer": {"device": "none"},
}
CHAT |= {"stage3_param_persistence_threshold": 1e4, "stage3_max_live_parameters": 3e7}
CHAT |= {"stage3_prefetch_bucket_size": 3e7, "memory_efficient_linear": False}
ACTIVATIONS: Config = dict.fromkeys(
    """partition_activations cpu_checkpointing contiguous_memory_optimization profile
    synchronize_checkpoint_boundary""".split(),
    False,
)


def of(zero: Config, **others: Any) -> Config:
    return {"zero_optimization": zero, **others}


BF16: Config = {"bf16": {"enabled": True}}
STARTS: dict[str, Config] = {
    "transformers-2": of(
        {"stage": 2, "offload_optimizer": CPU, **BUCKETS},
        fp16=SCALED,
        optimizer=ADAMW,
        scheduler={"type": "WarmupLR", "params": WARMUP},
        steps_per_print=2000,
        wall_clock_breakdown=False,
        **AUTO_SIZES,
    ),
    "transformers-3": of(
        STAGE_3 | {"offload_optimizer": CPU, "offload_param": CPU},
        fp16=SCALED,
        bf16={"enabled": "auto"},
        optimizer=ADAMW,
        scheduler=DECAY,
        **AUTO_SIZES,
    ),
    "axolotl-3": of(
        AXOLOTL,
        bf16={"enabled": "auto"},
        fp16=SCALED | {"auto_cast": False},
        wall_clock_breakdown=False,
        **AUTO_SIZES,
    ),
    "llama-factory-2": of(
        {"stage": 2, "round_robin_gradients": True, **BUCKETS},
        fp16=SCALED,
        bf16={"enabled": "auto"},
        zero_allow_untested_optimizer=True,
        **AUTO_SIZES,
    ),
    "llama-factory-3": of(
        STAGE_3, bf16={"enabled": "auto"}, zero_allow_untested_optimizer=True, **AUTO_SIZES
    ),
    "open-rlhf": of(
        RLHF | {"zero_hpz_partition_size": 1},
        prescale_gradients=False,
        data_types={"grad_accum_dtype": "fp32"},
        compile={"deepcompile": False},
        tensor_parallel={"autotp_size": 1},
        checkpoint={"load_universal": False},
        steps_per_print=100,
        gradient_clipping=1.0,
        **BF16,
    ),
    "deepspeed-chat": of(
        CHAT,
        steps_per_print=10,
        prescale_gradients=False,
        wall_clock_breakdown=False,
        hybrid_engine={"enabled": False},
        gradient_clipping=1.0,
        **BF16,
    ),
    "lightning": of({"stage": 2, "contiguous_gradients": True, "overlap_comm": True}),
    "minimal-1": of({"stage": 1}),
    "old-offload": of({"stage": 2, "cpu_offload": True, "contiguous_gradients": True}),
    "old-bfloat16": of({"stage": 2}, bfloat16={"enabled": True}),
    "null-sections": of({"stage": 3, "offload_optimizer": None, "offload_param": None}, fp16=None),
    "activations": of({"stage": 2}, activation_checkpointing=ACTIVATIONS),
    "profilers": of(
        {"stage": 2},
        flops_profiler={"enabled": False},
        tensorboard={"enabled": False},
        comms_logger={"enabled": False},
        wandb={"enabled": False},
    ),
    "accelerate": of(
        {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        **BF16,
        steps_per_print=float("inf"),
        gradient_clipping="auto",
    ),
    "comment": of({"stage": 2}, _comment="of our cluster"),
    "wall-clock": of({"stage": 1}, wall_clock_breakdown=True, steps_per_print=1),
    "wall-clock-3": of(
        {"stage": 3, "reduce_bucket_size": 1e10, "sub_group_size": 1e9},
        bf16={"enabled": "auto"},
        wall_clock_breakdown=True,
        **AUTO_SIZES,
    ),
}
REFUSED: dict[str, tuple[Any, str]] = {  # and what the sentence has
    "misspelt-top": (
        of({"stage": 2}, gradient_cliping=1.0),
        "gradient_cliping is not a key of D.*mean gradient_clipping",
    ),
    "misspelt-zero": (
        of({"stage": 2, "overlap_com": True}),
        "zero_optimization.overlap_com is not a key of DeepSpeed; did you mean overlap_comm",
    ),
    "misspelt-offload": (
        of({"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memroy": 1}}),
        "offload_optimizer.pin_memroy is not a key of DeepSpeed; .* mean pin_memory",
    ),
    "misspelt-fp16": (
        of({"stage": 2}, fp16={"enabled": False, "opt_level": "O2"}),
        "fp16.opt_level is not a key of DeepSpeed",
    ),
    "wrong-device": (
        of({"stage": 2, "offload_optimizer": {"device": "gpu"}}),
        "offload_optimizer.device is \"gpu\": give 'none', 'cpu'",
    ),
    "text-for-a-number": (of({"stage": 3, "sub_group_size": "large"}), 'sub_group_size is "large"'),
    "negative": (of({"stage": 2, "reduce_bucket_size": -5}), "reduce_bucket_size is -5: give"),
    "bool-fp16": (of({"stage": 2}, fp16=True), "fp16 is true; DeepSpeed wants a section"),
    "bool-bf16": (of({"stage": 2}, bf16=True), "bf16 is true; DeepSpeed wants a section"),
    "bool-zero": ({"zero_optimization": True}, "zero_optimization is true; DeepSpeed wants"),
    "bool-offload": (
        of({"stage": 2, "offload_optimizer": True}),
        "zero_optimization.offload_optimizer is true; DeepSpeed wants",
    ),
    "text-offload": (of({"stage": 3, "offload_param": "cpu"}), 'offload_param is "cpu"; Deep'),
    "bool-stage": (of({"stage": True}), "no zero_optimization.stage of 1, 2 or 3"),
    "stage-0": (of({"stage": 0}), "of 1, 2 or 3, but 0: set one, or give --config strategy/ddp"),
    "stage-auto": (of({"stage": "auto"}), "no zero_optimization.stage of 1, 2 or 3"),
    "no-zero": ({"train_batch_size": "auto"}, "no zero_optimization.stage of 1, 2 or 3"),
    "autotp": (
        of({"stage": 1}, tensor_parallel={"autotp_size": 2}),
        "tensor_parallel.autotp_size is 2, .*strategy/fsdp2_tp",
    ),
    "sequence": (of({"stage": 2}, sequence_parallel_size=2), "sequence_parallel_size is 2, .*_cp"),
    "hpz": (
        of({"stage": 3, "zero_hpz_partition_size": 16}),
        "zero_hpz_partition_size is 16, .*strategy/hsdp",
    ),
    "zero++": (
        of({"stage": 3, "zero_quantized_weights": True}),
        "zero_quantized_weights needs kern",
    ),
    "mics": (of({"stage": 3, "mics_shard_size": 2}), "mics_shard_size is 2, .*strategy/hsdp"),
    "amp": (
        of({"stage": 1}, amp={"enabled": True, "opt_level": "O1"}),
        "amp.enabled is true, .*bf16",
    ),
    "elasticity-off": (
        of({"stage": 2}, elasticity={"enabled": False}),
        "Elastic training has been",
    ),
    "elasticity": (of({"stage": 1}, elasticity={"enabled": True}), "elasticity.enabled is true"),
    "curriculum": (
        of({"stage": 1}, curriculum_learning={"enabled": True}),
        "curriculum_learning.ena",
    ),
    "deepcompile": (of({"stage": 3}, compile={"deepcompile": True}), "compile.deepcompile is true"),
    "tag-validation": (of({"stage": 1}, checkpoint={"tag_validation": "maybe"}), "MAYBE"),
    "sum-3": (of({"stage": 3}, gradient_allreduce_op="sum"), "not supported with ZeRO stage 3"),
    "partial-offload": (
        of({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}),
        "offload_optimizer.ratio is 0.3, .*: set 1",
    ),
    "offload-2": (
        of({"stage": 2, "offload_param": CPU}),
        "zero_optimization.offload_param needs ZeRO stage 3, .* is 2: remove it, or set zero_opt",
    ),
    "contiguous": (
        of(
            {"stage": 2},
            activation_checkpointing={
                "partition_activations": True,
                "contiguous_memory_optimization": True,
                "number_checkpoints": 2,
            },
        ),
        "activation_checkpointing.contiguous_memory_optimization is true, .*: set it to false",
    ),
    "gds": (
        of({"stage": 3}, aio={"use_gds": True}),
        "aio.use_gds copies from a GPU.*: set it to fal",
    ),
    "own-optimizer": (
        of({"stage": 2}, optimizer={"type": "AdamW", "params": {"lr": 1e-4}}),
        "optimizer.params.lr is 0.0001 in the DeepSpeed file",
    ),
    "own-sizes": (
        of({"stage": 2}, train_batch_size=32),
        "train_batch_size 32, and trainer and data",
    ),
    "list": ([1], "wants an object"),
}


def why_not(config: Any, tmp_path: Path) -> str:
    """The first sentence of the checks of `fit`, without a model."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    try:
        found = deepspeed_config.without_auto(deepspeed_config.read(str(file)))
    except InputError as error:
        return str(error)
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    found |= sizes | {"gradient_accumulation_steps": 4}
    for name in ("optimizer", "scheduler"):
        found.pop(name, None)
    return next(deepspeed_check.refusals(found, "cpu"), "")


@pytest.mark.slow
def test_the_checks_know_what_starts(tmp_path: Path) -> None:
    assert {name: why for name in STARTS if (why := why_not(STARTS[name], tmp_path))} == {}
    for name, (config, sentence) in REFUSED.items():
        # with the sizes, the optimizer and the strategy of a training
        if not name.startswith(("own-", "offload-2")):
            assert re.search(sentence, why_not(config, tmp_path)), (name, why_not(config, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("has_it", [False, True])
def test_nvme_needs_libaio(has_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder.async_io import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda *_, **__: has_it)
    config = of({"stage": 3, "offload_param": {"device": "nvme"}})
    why = deepspeed_check.lacks_on_this_machine(config)
    assert ("offload_param.device nvme needs libaio" in why) == (not has_it), why
    if not has_it:
        with pytest.raises(InputError, match="needs libaio"):
            ZeroStrategy(config=config)._configure_launcher()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", tiers(STARTS, daily=["transformers-2", "null-sections", "wall-clock"])
)
def test_a_published_form_starts(name: str, flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(STARTS[name]))
    steps = [
        "--trainer.max_steps=2",
        "--trainer.precision=bf16-mixed",
        "--trainer.limit_val_batches=0",
    ]
    assert run("fit", *flags, *steps, f"--deepspeed={tmp_path}/ds.json") == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", tiers(REFUSED, daily=["bool-fp16", "misspelt-zero", "own-sizes"]))
def test_a_form_that_deepspeed_refuses_is_a_sentence(
    name: str, flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    config, sentence = REFUSED[name]
    (tmp_path / "ds.json").write_text(json.dumps(config))
    given = ["--trainer.precision=bf16-mixed", f"--deepspeed={tmp_path}/ds.json"]
    assert re.search(sentence, refused("fit", [*flags, *given], capfd))
    assert not list(tmp_path.glob("runs/*/*"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"zero_optimization": {"stage": 1, "stage": 3}}', "it has the key 'stage' twice"),
        ('{"a": 1, "zero_optimization": {"stage": 1}, "a": 2}', "it has the key 'a' twice"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "cannot read '.*a.json': maximum recursion depth"),
    ],
    ids=["below", "top", "deep"],
)
def test_json_that_is_read_otherwise_than_written(text: str, sentence: str, tmp_path: Path) -> None:
    """DeepSpeed refuses a key that is given twice; Python's parser takes the last."""
    (file := tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=sentence):
        deepspeed_config.read(str(file))
