"""On a real GPU: the CPU's losses, plain steps that do not wait, a NaN is skipped, ZeRO-3 ends."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from dist_template.callbacks.training_log import logs
from tests.support.parity import MODELS
from tests.support.runs import logged, only_run, run_in_subprocess
from tests.support.strategies import flags_of

# DIST_GPU_TESTS_ON=cpu runs these lines without a GPU, which proves nothing about one.
ON = os.environ.get("DIST_GPU_TESTS_ON", "gpu")
HAS_GPU = torch.cuda.is_available() or ON == "cpu"
LACKS = pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
pytestmark = [pytest.mark.gpu, pytest.mark.slow, LACKS]
STRATEGIES = ["one", "ddp", "fsdp2", "fsdp2_offload", "zero2", "zero3", "zero3_offload"]
PARITY, HALF = 1e-4, 2e-2  # relative, of losses: other sums in fp32; bf16's rounding
WARM_UP = 3  # steps


class RefuseWaits(Callback):
    """Lets torch raise an error where a plain step waits for the device."""

    def on_train_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        is_plain = trainer.global_step >= WARM_UP and not logs(trainer, trainer.global_step + 1)
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error" if is_plain else "default")

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")

    on_exception = on_train_batch_end


class Poison(Callback):
    """One gradient of the fourth step is not finite."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 3:
            gradient = next(p.grad for p in pl_module.parameters() if p.grad is not None)
            with torch.no_grad():
                gradient.mul_(math.nan)


def losses(flags: list[str], folder: Path, strategy: str, *more: str, on: str = ON) -> list[float]:
    """Returns the losses of a training of 12 steps in a process of its own, which must end well."""
    given = [*flags, *(flags_of(strategy) if strategy != "one" else [])]
    given += ["--trainer.max_steps=12", "--model.optim.warmup=2", "--trainer.devices=1"]
    given += [f"--trainer.accelerator={on}", f"--run.root={folder}/runs", *more]
    done = run_in_subprocess("fit", *given)
    assert done.returncode == 0, done.stderr[-3000:]
    return list(logged(only_run(folder), "train/loss").values())


@pytest.mark.parametrize("model", ["llama", "deepseek_v3"])
def test_strategies_on_one_device_have_the_losses_of_a_cpu(
    flags: list[str], tmp_path: Path, model: str
) -> None:
    """Of each strategy that one device can run, and of bf16-mixed, with the CPU in 32-true."""
    flags = [*flags, f"--model.architecture={MODELS[model]}"]
    want = losses(flags, tmp_path / "cpu", "one", on="cpu")
    half = losses(flags, tmp_path / "half", "one", "--trainer.precision=bf16-mixed")
    assert half == pytest.approx(want, rel=HALF)
    for strategy in STRATEGIES if ON == "gpu" else STRATEGIES[:1]:
        got = losses(flags, tmp_path / strategy, strategy)
        assert got == pytest.approx(want, rel=PARITY), strategy


@pytest.mark.parametrize("strategy", ["one", "ddp", "fsdp2"])
def test_a_plain_step_does_not_wait_for_the_device(
    flags: list[str], tmp_path: Path, strategy: str
) -> None:
    """A plain step does not wait for the device; torch names the line that does."""
    more = ["--trainer.limit_val_batches=0", "--trainer.log_every_n_steps=4"]
    more += ["--last_checkpoint.every_n_steps=100"]
    losses(flags, tmp_path, strategy, *more, f"--trainer.callbacks+={__name__}.RefuseWaits")


@pytest.mark.parametrize("strategy", ["one", "fsdp2", "fsdp2_offload"])
def test_a_step_with_nan_is_skipped_on_device_and_host(
    flags: list[str], tmp_path: Path, strategy: str
) -> None:
    """The step is skipped, with the optimizer on the device and on the host."""
    more = [f"--trainer.callbacks+={__name__}.Poison", "--numerics.on_non_finite=skip"]
    found = losses(flags, tmp_path, strategy, *more)
    assert len(found) >= 11 and all(map(math.isfinite, found[-2:]))


@pytest.mark.parametrize("strategy", ["zero3", "zero3_offload"])
def test_a_zero_3_training_without_a_last_validation_ends_well(
    flags: list[str], tmp_path: Path, strategy: str
) -> None:
    """A training whose last step is followed by no validation ends well."""
    losses(flags, tmp_path, strategy, "--trainer.val_check_interval=5")
