"""DeepSpeed: its configuration agrees with the rest, nothing is compiled, and the numbers are those without it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from trainer_dev.module import LanguageModule

from dist_template import InputError
from dist_template.cli.limits.machine import Setup
from dist_template.parallel import deepspeed_config
from dist_template.parallel.zero import _materialize
from dist_template.strategies import ZeroStrategy
from tests.support import deepspeed_json as tool
from tests.support.library import Machine
from tests.support.runs import CONFIGS, OURS, logged, only_run, run
from tests.support.strategies import flags_of

ZERO = "--trainer.strategy=dist_template.parallel.zero.ZeroStrategy"
EVERY_AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "offload_optimizer": {"device": "cpu", "pin_memory": "auto"},
    },
}


def settings(accelerator: str = "cuda", precision: str = "bf16-mixed") -> Any:
    """16 processes with 4 sequences each, accumulated 4 times."""
    data = SimpleNamespace(micro_batch_size=4, global_batch_size=256)
    machine = Machine(accelerator, 16, precision=precision)
    return Setup(machine, {"gradient_clip_val": 1.0}, SimpleNamespace(), data, None, trains=True)  # ty: ignore[invalid-argument-type]


def resolved(given: Any, used: Any) -> Any:
    return deepspeed_config.resolve(deepspeed_config.read(given), used)


def test_every_auto_of_a_hugging_face_file_is_filled_in() -> None:
    filled = resolved(EVERY_AUTO, settings())
    assert "auto" not in json.dumps(filled)
    assert {key: filled[key] for key in EVERY_AUTO if key.startswith(("train", "gradient"))} == {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
    }
    assert filled["bf16"]["enabled"] is True and filled["fp16"] == {"enabled": False, "loss_scale": 0}
    assert not {"optimizer", "scheduler"} & set(filled), "module.py builds them"
    zero = filled["zero_optimization"]
    assert zero.keys() == {"stage", "offload_optimizer"}, "buckets have DeepSpeed's defaults"
    assert zero["offload_optimizer"]["pin_memory"] is True
    on_cpu = resolved(EVERY_AUTO, settings(accelerator="cpu", precision="32-true"))
    assert on_cpu["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    assert on_cpu["bf16"]["enabled"] is False


CONFLICTS: dict[str, tuple[dict[str, Any], str]] = {
    "micro-batch": ({"train_micro_batch_size_per_gpu": 8}, "_per_gpu 8, and trainer and data 4"),
    "global batch": ({"train_batch_size": 64}, "train_batch_size 64, and trainer and data 256"),
    "accumulation": ({"gradient_accumulation_steps": 1}, "_steps 1, and trainer and data 4"),
    "clipping": ({"gradient_clipping": 0.5}, "gradient_clipping 0.5, and trainer and data 1.0"),
    "no half precision": ({"bf16": {"enabled": False}}, "bf16.enabled false, and trainer and data true"),
    "the other half": ({"fp16": {"enabled": True}}, "fp16.enabled true, and trainer and data false"),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "float16.*and data .bfloat16"),
    "optimizer": ({"optimizer": {"type": "Lion"}}, "optimizer.type is .Lion.*model.optim sets"),
    "learning rate": ({"optimizer": {"params": {"lr": 1e-3}}}, "params.lr is 0.001 .*model.optim sets"),
    "schedule": ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.type is .WarmupDecayLR.*model.optim sets"),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_a_conflict_names_both_places(case: str) -> None:
    change, sentence = CONFLICTS[case]
    with pytest.raises(InputError, match=sentence):
        resolved({"zero_optimization": {"stage": 2}} | change, settings())


def test_every_conflict_is_listed() -> None:
    sections = {"bf16": {"enabled": False}, "scheduler": {"type": "WarmupCosineLR"}, "train_batch_size": 64}
    with pytest.raises(InputError, match="train_batch_size 64(?s:.)*bf16.enabled(?s:.)*scheduler.type is "):
        resolved({"zero_optimization": {"stage": 2}} | sections, settings())


def test_a_file_that_cannot_be_one_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{'stage': 2}")
    (tmp_path / "list.json").write_text("[]")
    for wrong, sentence in (
        (str(tmp_path / "nowhere.json"), "nowhere.json.*No such file"),
        (str(tmp_path / "broken.json"), "cannot read .*broken.json': Expecting property name"),
        (str(tmp_path / "list.json"), "wants an object"),
        ({"zero_optimisation": {"stage": 2}}, "no zero_optimization.stage"),
    ):
        with pytest.raises(InputError, match=sentence):
            ZeroStrategy(config=wrong)


def test_the_file_replaces_the_other_arguments() -> None:
    strategy = ZeroStrategy(stage=2, offload_optimizer=True, config={"zero_optimization": {"stage": 3}})
    assert strategy.config == {"zero_optimization": {"stage": 3}}


GUIDES: dict[str, Any] = {  # of Hugging Face's pages on DeepSpeed
    **EVERY_AUTO,
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
OFFLOAD = {"device": "cpu", "pin_memory": True}
SECTIONS: dict[int, dict[str, Any]] = {
    2: {
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "reduce_scatter": True,
        "round_robin_gradients": True,
    },
    3: {
        "offload_param": OFFLOAD,
        "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


@pytest.mark.parametrize("stage", SECTIONS)
@pytest.mark.parametrize("offloads", [True, False])
def test_the_guides_file_replaces_the_keys_of_our_files(
    stage: int, offloads: bool, flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    """zero2.yaml and zero3.yaml say that nothing is offloaded; the file in their place may."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "reduce_bucket_size": "auto"}
    zero |= SECTIONS[stage] | ({"offload_optimizer": OFFLOAD} if offloads else {})
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**GUIDES, "zero_optimization": zero}))
    own = [f"--config=strategy/zero{stage}", f"--trainer.strategy.config={path}"]
    tool.main(["deepspeed-config", *flags, *own], OURS)
    printed = capfd.readouterr().out
    assert '"auto"' not in printed
    resolved = json.loads(printed)["zero_optimization"]
    assert ("offload_optimizer" in resolved) == offloads and ("offload_param" in resolved) == (stage == 3)


def test_the_json_is_printed_alone_and_is_accepted_as_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = ["--trainer.num_nodes=2", "--trainer.devices=8"]
    flags = [f"--config={CONFIGS}/pretrain.yaml", ZERO, *sizes, "--trainer.precision=bf16-mixed"]
    own = ["stage=3", "offload_optimizer=true", "offload_parameters=true"]
    tool.main(["deepspeed-config", *flags, *(f"--trainer.strategy.{flag}" for flag in own)], OURS)
    printed = capfd.readouterr().out
    config = json.loads(printed)
    assert config["train_batch_size"] == 256 == 4 * config["gradient_accumulation_steps"] * 2 * 8
    assert config["bf16"] == {"enabled": True}
    zero = config["zero_optimization"]
    for section in (zero["offload_optimizer"], zero["offload_param"]):
        assert section["device"] == "cpu" and section["pin_memory"] is True
    assert zero["overlap_comm"] and zero["contiguous_gradients"] and zero["stage3_gather_16bit_weights_on_model_save"]
    (tmp_path / "ds.json").write_text(printed)
    tool.main(["deepspeed-config", *flags, f"--trainer.strategy.config={tmp_path}/ds.json"], OURS)
    assert capfd.readouterr().out == printed


@pytest.mark.slow
def test_one_process_trains_as_without_deepspeed_compiles_nothing_and_leaves_no_patch(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "extensions").mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    linear = torch.nn.functional.linear
    # 8 sequences a step: 4 micro-batches of 2
    flags = [*flags, "--trainer.max_steps=6", "--trainer.gradient_clip_val=0.5", "--model.optim.learning_rate=0.01"]
    assert run("fit", *flags, "--run.name=plain") == 0

    def clips(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("DeepSpeed clips, and the module does not")

    steps: list[int] = []
    monkeypatch.setattr(LanguageModule, "configure_gradient_clipping", clips)
    monkeypatch.setattr(LanguageModule, "on_before_optimizer_step", lambda module, _: steps.append(module.global_step))
    for stage in (3, 2, 1):
        assert run("fit", *flags, f"--run.name=zero{stage}", ZERO, f"--trainer.strategy.stage={stage}") == 0
        assert steps == [0, 1, 2, 3, 4, 5], "once per optimizer step, not per micro-batch"
        steps.clear()
        assert torch.nn.functional.linear is linear, "ZeRO-3 puts another function in its place"
    assert not any((tmp_path / "extensions").iterdir()), "nothing is compiled"

    plain = only_run(tmp_path, "plain")
    assert len(norms := logged(plain, "train/grad_norm")) == 6 and min(norms.values()) > 0.5, "clipping is at work"
    for stage in (1, 2, 3):
        zero = only_run(tmp_path, f"zero{stage}")
        assert logged(zero, "train/grad_norm") == pytest.approx(norms, rel=1e-4), stage
        for metric in ("train/loss", "eval/loss", "train/learning_rate"):
            assert logged(zero, metric) == pytest.approx(logged(plain, metric), rel=1e-5), (stage, metric)


def test_a_skeleton_gets_memory_and_keeps_its_ties() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    shared: Any = model["embedding"].weight
    model["head"].weight = shared
    vars(shared)["of_note"] = "kept"
    for parameter in model.parameters():
        _materialize(parameter, torch.device("cpu"))
    assert model["head"].weight is model["embedding"].weight is shared
    assert shared.device.type == "cpu" and shared.shape == (5, 3) and vars(shared)["of_note"] == "kept"


def test_nvme_refuses_asynchronous_checkpoints_before_anything_starts(
    flags: list[str], capfd: pytest.CaptureFixture, tmp_path: Path
) -> None:
    strategy = [*flags_of("zero3_nvme"), f"--trainer.strategy.init_args.nvme_path={tmp_path}"]
    assert run("fit", *flags, *strategy, "--last_checkpoint.asynchronous=true") == 2
    assert "last_checkpoint.asynchronous true does not work with state on NVMe" in capfd.readouterr().err


def test_zero3_gets_its_parameters_back_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's teardown after `fit` moves the model to the host; DeepSpeed would leave it there in stage 3."""
    asked: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: asked.append(device) or self)
    monkeypatch.setattr(ZeroStrategy, "root_device", torch.device("cuda", 1))
    monkeypatch.setattr(ZeroStrategy, "_config_of_trainer", lambda self: {"zero_optimization": {"stage": 3}})
    monkeypatch.setattr(DeepSpeedStrategy, "setup", lambda self, trainer: None)
    strategy = ZeroStrategy(stage=3)
    module: Any = nn.BatchNorm1d(4)
    strategy._lightning_module = module
    strategy.setup(SimpleNamespace())
    assert asked == [torch.device("cuda", 1)] * 5, "two parameters, three buffers"


def test_deepspeeds_own_clock_is_off_unless_the_file_has_it() -> None:
    """It waits for the device before and after each micro-batch."""
    zero = {"zero_optimization": {"stage": 2}}
    assert resolved(zero, settings())["timers"] == {"throughput": {"enabled": False}}
    own = {"timers": {"throughput": {"enabled": True, "synchronized": False}}}
    assert resolved(zero | own, settings())["timers"] == own["timers"]
