"""On a real GPU: a training equals the CPU's, and a plain step does not wait for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from tests.support.library import logs
from tests.support.runs import logged, only_run, run
from tests.support.strategies import flags_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
STEPS = ["--trainer.max_steps=12", "--trainer.precision=32-true", "--model.optim.warmup=2"]
WARM_UP = 3  # steps


class RefuseWaits(Callback):
    """Lets torch raise an error where a plain step waits for the device; events are allowed."""

    def on_train_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        is_plain = trainer.global_step >= WARM_UP and not logs(trainer, trainer.global_step + 1)
        torch.cuda.set_sync_debug_mode("error" if is_plain else "default")

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    on_exception = on_train_batch_end


@pytest.mark.parametrize("strategy", ["one", "ddp", "fsdp2"])
def test_a_gpu_trains_like_the_cpu(flags: list[str], tmp_path: Path, strategy: str) -> None:
    folders = {"cpu": tmp_path / "cpu", "gpu": tmp_path / "gpu"}
    for accelerator, folder in folders.items():
        more = flags_of(strategy) if strategy != "one" and accelerator == "gpu" else []
        more += [
            f"--run.root={folder}/runs", f"--trainer.accelerator={accelerator}",
            "--trainer.devices=1",
        ]  # fmt: skip
        assert run("fit", *flags, *STEPS, *more) == 0
    losses = {name: logged(only_run(folder), "train/loss") for name, folder in folders.items()}
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=1e-3)


@pytest.mark.parametrize("strategy", ["one", "fsdp2"])
def test_a_plain_step_waits_for_nothing(flags: list[str], strategy: str) -> None:
    more = [] if strategy == "one" else flags_of(strategy)
    more += ["--trainer.accelerator=gpu", "--trainer.devices=1", "--trainer.limit_val_batches=0"]
    more += ["--trainer.log_every_n_steps=4", "--last_checkpoint.every_n_steps=100"]
    assert run("fit", *flags, *STEPS, *more, f"--trainer.callbacks+={__name__}.RefuseWaits") == 0
