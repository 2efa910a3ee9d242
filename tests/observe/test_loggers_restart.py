"""TensorBoard and W&B hold what metrics.jsonl holds, at the same steps, also after a run was killed and resumed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch import Callback

from dist_template.cluster.environment import git
from tests.support import read_back
from tests.support.runs import CONFIGS, run_in_subprocess


class KillAfter(Callback):
    def __init__(self, step: int, api_key: str) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def restarted(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all loggers that was killed in step 7 and resumed from step 5, with a secret on the command line."""
    folder = tmp_path_factory.mktemp("restarted")
    both = folder / "both.yaml"
    text = (CONFIGS / "logger" / "wandb.yaml").read_text("utf-8")
    both.write_text(
        text.replace("  logger:\n", "  logger:\n    - class_path: TensorBoard\n"), "utf-8"
    )
    flags = [
        f"--config={CONFIGS}/quickstart.yaml", f"--config={both}", f"--run.root={folder}",
        "--run.name=r",
    ]  # fmt: skip
    flags += [
        "--data.source=TextFiles", f"--data.source.paths=[{corpus}/*.txt]",
        "--data.tokenizer=Bytes",
    ]  # fmt: skip
    flags += [
        f"--data.cache_dir={cache}", "--data.seq_len=32", "--data.validation_share=0.2",
        "--data.test_share=0",
    ]  # fmt: skip
    flags += ["--data.global_batch_size=4", "--data.micro_batch_size=2", "--model.sample_tokens=4"]
    flags += [
        "--trainer.max_steps=10", "--trainer.log_every_n_steps=1", "--trainer.val_check_interval=5",
    ]  # fmt: skip
    flags += [
        "--last_checkpoint.every_n_steps=5", "--trainer.accelerator=cpu", "--trainer.devices=1",
    ]  # fmt: skip
    flags += [f"--trainer.callbacks+={__name__}.KillAfter", "--trainer.callbacks.api_key=s3cr3t"]
    for step, code in (7, -signal.SIGKILL), (99, 0):
        step_flag = f"--trainer.callbacks.step={step}"
        ended = run_in_subprocess("fit", *flags, step_flag, DIST_RUN_ID="one", WANDB_MODE="offline")
        assert ended.returncode == code, ended.stderr
    return folder / "r" / "one"


@pytest.mark.slow
def test_tensorboard_has_every_metric_once_per_step_after_a_resume(restarted: Path) -> None:
    points, expected = read_back.tensorboard_points(restarted), read_back.metrics(restarted)
    assert set(points["train/loss"]) == set(range(1, 11)) and set(points["eval/loss"]) == {0, 5, 10}
    for step, metrics in expected.items():
        shown = {name: points[name][step][-1] for name in metrics}
        assert shown == pytest.approx(metrics, rel=1e-6, nan_ok=True), (
            step
        )  # TensorBoard has float32
    assert all(len(values) == 1 for values in points["train/loss"].values())


@pytest.mark.slow
def test_wandb_continues_the_run_with_every_metric_configuration_commit_and_command(
    restarted: Path,
) -> None:
    files = read_back.wandb_files(restarted)
    assert len(files) == 2 and all(file.name == "run-one.wandb" for file in files)
    points, expected = read_back.wandb_points(restarted), read_back.metrics(restarted)
    for step in range(6, 11):  # wandb writes in blocks; a killed process loses the last one
        shown = {name: points[name][step][-1] for name in expected[step]}
        assert shown == pytest.approx(expected[step], rel=1e-6, nan_ok=True), step
    config = read_back.wandb_config(files[1])
    assert config["data"]["seq_len"] == 32 and config["last_checkpoint"]["every_n_steps"] == 5
    assert config["environment"]["git_commit"] == git("rev-parse", "HEAD")
    assert (
        config["environment"]["command"]
        == json.loads((restarted / "environment.json").read_text())["command"]
    )


@pytest.mark.slow
def test_no_logger_records_a_secret_of_the_command_line(restarted: Path) -> None:
    files = [path for path in restarted.rglob("*") if path.is_file()]
    assert len(read_back.wandb_files(restarted)) == 2
    assert any("tfevents" in path.name for path in files)
    assert [path for path in files if b"s3cr3t" in path.read_bytes()] == []
