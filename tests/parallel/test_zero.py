"""DeepSpeed: its configuration agrees with the rest, and it leaves nothing behind."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer_dev.module import LanguageModule

from dist_template import InputError
from dist_template.cli.limits.machine import Setup
from dist_template.parallel import deepspeed_config
from dist_template.strategies import ZeroStrategy
from tests.support.library import Machine
from tests.support.runs import refused, run
from tests.support.strategies import flags_of

ZERO = "--trainer.strategy=dist_template.parallel.zero.ZeroStrategy"
EVERY_AUTO = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
        "weight_decay": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        "offload_optimizer": {"device": "cpu", "pin_memory": "auto"}},
}  # fmt: skip


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
    found = [filled[key] for key in EVERY_AUTO if key.startswith(("train", "gradient"))]
    assert found == [256, 4, 4, 1.0]
    assert filled["bf16"]["enabled"] is True
    assert filled["fp16"] == {"enabled": False, "loss_scale": 0}
    assert not {"optimizer", "scheduler"} & set(filled), "module.py builds them"
    zero = filled["zero_optimization"]
    assert zero.keys() == {"stage", "offload_optimizer"}, "buckets have DeepSpeed's defaults"
    assert zero["offload_optimizer"]["pin_memory"] is True
    on_cpu = resolved(EVERY_AUTO, settings(accelerator="cpu", precision="32-true"))
    assert on_cpu["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    assert on_cpu["bf16"]["enabled"] is False


CONFLICTS: list[tuple[dict[str, Any], str]] = [  # test_limits.py has more
    ({"train_batch_size": 64}, "train_batch_size 64, and trainer and data 256"),
    ({"gradient_accumulation_steps": 1}, "_steps 1, and trainer and data 4"),
    ({"gradient_clipping": 0.5}, "gradient_clipping 0.5, and trainer and data 1.0"),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "float16.*and data .bfloat16"),
    ({"optimizer": {"type": "Lion"}}, "optimizer.type is .Lion.*model.optim sets"),
    ({"scheduler": {"type": "WarmupDecayLR"}},
        "scheduler.type is .WarmupDecayLR.*model.optim sets"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), CONFLICTS, ids=[words for _, words in CONFLICTS])
def test_a_conflict_names_both_places(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolved({"zero_optimization": {"stage": 2}} | change, settings())


def test_a_file_that_cannot_be_one_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{'stage': 2}")
    (tmp_path / "list.json").write_text("[]")
    for wrong, sentence in (
        (str(tmp_path / "broken.json"), "cannot read .*broken.json': Expecting property name"),
        (str(tmp_path / "list.json"), "wants an object"),
        ({"zero_optimisation": {"stage": 2}}, "no zero_optimization.stage"),
    ):
        with pytest.raises(InputError, match=sentence):
            ZeroStrategy(config=wrong)


@pytest.mark.slow
def test_one_process_leaves_nothing_behind(flags: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "extensions").mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    linear = torch.nn.functional.linear

    def clips(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("DeepSpeed clips, and the module does not")

    monkeypatch.setattr(LanguageModule, "configure_gradient_clipping", clips)
    for stage in (3, 2):
        more = [ZERO, f"--trainer.strategy.stage={stage}", "--trainer.max_steps=2"]
        assert run("fit", *flags, *more) == 0
        assert torch.nn.functional.linear is linear, "ZeRO-3 puts another function in its place"
    assert not any((tmp_path / "extensions").iterdir())


def test_nvme_refuses_asynchronous_checkpoints(flags: Any, capfd: Any, tmp_path: Path) -> None:
    flags += [*flags_of("zero3_nvme"), f"--trainer.strategy.init_args.nvme_path={tmp_path}"]
    error = refused("fit", [*flags, "--last_checkpoint.asynchronous=true"], capfd)
    assert "last_checkpoint.asynchronous true does not work with state on NVMe" in error
