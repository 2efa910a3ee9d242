"""`config deepspeed`: the JSON of a training before it runs; and the JSON files of the guides."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from tests.support.runs import clean_environment, logged, only_run, refused, run
from tests.support.tiers import tiers

STAGES = ["zero1", "zero2", "zero3"]
# The files of the guides to DeepSpeed training, as published, and the precision that fits.
MEMORY = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 4,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
ZERO_2 = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
ZERO_3 = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
GUIDES = {"zero2": ZERO_2, "zero3": ZERO_3}


def has_fp16() -> bool:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    return bool(CPU_Accelerator().is_fp16_supported())


def written(folder: Path, *flags: str) -> Any:
    file = folder / "ds_config.json"
    assert run("config", "deepspeed", *flags, f"--output={file}") == 0
    return json.loads(file.read_text())


def trained(flags: list[str], folder: Path, *given: str) -> dict[int, float]:
    """The losses of three steps on one process."""
    changed = [
        f"--run.root={folder}/runs",
        "--trainer.max_steps=3",
        "--trainer.limit_val_batches=0",
    ]
    assert run("fit", *flags, *changed, *given) == 0
    return logged(only_run(folder), "train/loss")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(STAGES, daily=["zero3"]))
def test_a_generated_json_trains_as_the_strategy_does(
    strategy: str, flags: list[str], tmp_path: Path
) -> None:
    config = written(tmp_path, *flags, f"--config=strategy/{strategy}")
    assert config["zero_optimization"]["stage"] == int(strategy[-1])
    assert [config[key] for key in ("train_batch_size", "gradient_clipping")] == [8, 1.0]
    by_file = trained(flags, tmp_path / "file", f"--config=strategy/{strategy}")
    by_json = trained(flags, tmp_path / "json", f"--deepspeed={tmp_path}/ds_config.json")
    assert by_file == by_json and len(by_file) == 3


def test_values_are_those_of_the_real_machine(flags: list[str], tmp_path: Path) -> None:
    """With the cluster's sizes, its precision and offload; nothing of this machine."""
    sizes = ["--devices=8", "--nodes=2", "--data.global_batch_size=256"]
    offload = "--trainer.strategy=deepspeed_stage_3_offload"
    half = ["--trainer.accelerator=gpu", "--trainer.precision=bf16-mixed"]
    config = written(tmp_path, *flags, offload, *half, *sizes)
    batch = [config[f"{key}"] for key in ("train_batch_size", "gradient_accumulation_steps")]
    assert batch == [256, 8] and config["train_micro_batch_size_per_gpu"] == 2
    zero = config["zero_optimization"]
    assert {zero[key]["device"] for key in ("offload_optimizer", "offload_param")} == {"cpu"}
    assert zero["offload_param"]["pin_memory"] is True and config["bf16"] == {"enabled": True}
    assert "auto" not in json.dumps(config)


TRAINER = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
tokens = [(torch.arange(8) + n) % 31 for n in range(16)]
rows = [{"input_ids": row, "labels": row} for row in tokens]
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
arguments = TrainingArguments(
    output_dir=sys.argv[2], use_cpu=True, deepspeed=sys.argv[1], max_steps=2,
    per_device_train_batch_size=4, report_to=[], save_strategy="no", disable_tqdm=True)
trainer = Trainer(model=LlamaForCausalLM(LlamaConfig(**sizes)), args=arguments, train_dataset=rows)
trainer.train()
print("trained", trainer.state.global_step, trainer.model_wrapped.optimizer.__class__.__name__)
"""


def test_hugging_faces_arguments_fill_each_auto(flags: list[str], tmp_path: Path) -> None:
    """By the class with which its Trainer reads a JSON file."""
    written(tmp_path, *flags, "--config=strategy/zero2", "--auto")
    config = HfTrainerDeepSpeedConfig(f"{tmp_path}/ds_config.json")
    options: Any = {"use_cpu": True, "report_to": [], "per_device_train_batch_size": 4}
    arguments = TrainingArguments(str(tmp_path), gradient_accumulation_steps=2, **options)
    config.trainer_config_process(arguments)
    config.trainer_config_finalize(arguments, torch.nn.Linear(1, 1), 2)
    assert "auto" not in json.dumps(config.config)
    assert config.config["train_batch_size"] == 8


@pytest.mark.slow
@pytest.mark.nightly
def test_hugging_faces_trainer_reads_a_json_with_auto(flags: list[str], tmp_path: Path) -> None:
    config = written(tmp_path, *flags, "--config=strategy/zero2", "--auto")
    assert config["train_batch_size"] == config["fp16"]["enabled"] == "auto"
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = clean_environment(**rank, MASTER_PORT="29731", DS_ACCELERATOR="cpu")
    given = [sys.executable, "-c", TRAINER, f"{tmp_path}/ds_config.json", str(tmp_path / "out")]
    done = subprocess.run(given, env=environment, capture_output=True, text=True, check=False)
    assert "trained 2 DeepSpeedZeroOptimizer" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES)
def test_a_guides_json_is_taken_as_it_is(guide: str, flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "guide.json"
    file.write_text(json.dumps(GUIDES[guide]))
    given = [f"--deepspeed={file}", "--trainer.precision=bf16-mixed"]
    losses = trained(flags, tmp_path, *given)
    assert losses.keys() == {1, 2, 3} and losses[3] < losses[1]


def test_the_guides_json_in_fp16_is_taken_for_gpus(flags: list[str], tmp_path: Path) -> None:
    """Its batch of 32 in 4 micro-batches; a CPU has no fp16, so the JSON is completed alone."""
    file = tmp_path / "guide.json"
    file.write_text(json.dumps(MEMORY))
    given = [f"--deepspeed={file}", "--trainer.accelerator=gpu", "--trainer.precision=16-mixed"]
    batch = ["--data.global_batch_size=32", "--data.micro_batch_size=4", "--devices=2"]
    config = written(tmp_path, *flags, *given, *batch)
    assert {key: config[key] for key in MEMORY if key != "fp16"} == {
        key: MEMORY[key] for key in MEMORY if key != "fp16"
    }
    assert config["fp16"]["enabled"] and config["train_micro_batch_size_per_gpu"] == 4


@pytest.mark.slow
@pytest.mark.skipif(has_fp16(), reason="this CPU has fp16, and trains")
def test_the_guides_json_in_fp16_is_one_sentence_on_a_cpu(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "guide.json"
    file.write_text(json.dumps(MEMORY))
    given = [f"--deepspeed={file}", "--trainer.precision=16-true"]
    batch = ["--data.global_batch_size=32", "--data.micro_batch_size=8"]
    assert run("prepare", *flags) == 0
    sentence = refused("fit", [*flags, *given, *batch], capfd)
    assert "trainer.precision '16-true': this CPU has no fp16 for DeepSpeed; train on" in sentence


WRONG = {
    "--config=strategy/fsdp2": "MeshStrategy is not DeepSpeed's and has no JSON: give",
    "--config=strategy/zero2 --output={here}": "is a folder: give a file, as",
    "--config=strategy/zero2 --output={here}/no/x.json": "is no folder that you can write to",
    "--config=strategy/zero2 --data.global_batch_size=9": "global_batch_size 9",
    "--config=strategy/zero2 --devices=0": "--devices",
    "--config=strategy/zero2 --atuo": "atuo",
    "--trainer.strategy=zero3 --trainer.strategy.stage=4": "stage",
}


@pytest.mark.parametrize("given", WRONG)
def test_what_cannot_be_written_is_one_sentence(
    given: str, flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(here=tmp_path) for word in given.split()]
    sentence = refused("config", ["deepspeed", *flags, *words], capfd)
    assert WRONG[given] in sentence and not list(tmp_path.glob("*.json"))


def test_a_json_that_is_not_there_is_one_sentence(
    flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert "cannot read 'no.json'" in refused("fit", [*flags, "--deepspeed=no.json"], capfd)
    refused("fit", [*flags, "--deepspeed"], capfd)
