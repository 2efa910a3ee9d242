"""TensorBoard and W&B hold what metrics.jsonl holds, also after a run was killed and resumed."""

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
from tests.support.runs import CONFIGS, SHIPPED, run_in_subprocess, small


class KillAfter(Callback):
    def __init__(self, step: int, api_key: str) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def restarted(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all loggers, killed in step 7 and resumed from step 5; its flags have a secret."""
    folder = tmp_path_factory.mktemp("restarted")
    both = folder / "both.yaml"
    text = (SHIPPED / "logger" / "wandb.yaml").read_text("utf-8")
    two = text.replace("  logger:\n", "  logger:\n    - class_path: TensorBoard\n")
    both.write_text(two, "utf-8")
    flags = [
        f"--config={CONFIGS}/quickstart.yaml", f"--config={both}", *small(corpus, cache, folder),
        f"--run.root={folder}", "--run.name=r", "--data.global_batch_size=4",
        "--trainer.max_steps=10", "--trainer.val_check_interval=5",
        "--last_checkpoint.every_n_steps=5", f"--trainer.callbacks+={__name__}.KillAfter",
        "--trainer.callbacks.api_key=s3cr3t",
    ]  # fmt: skip
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
        assert shown == pytest.approx(metrics, rel=1e-6, nan_ok=True)  # TensorBoard has float32
    assert all(len(values) == 1 for values in points["train/loss"].values())


@pytest.mark.slow
def test_wandb_continues_the_run_with_every_metric_and_setting(restarted: Path) -> None:
    files = read_back.wandb_files(restarted)
    assert len(files) == 2 and all(file.name == "run-one.wandb" for file in files)
    points, expected = read_back.wandb_points(restarted), read_back.metrics(restarted)
    for step in range(6, 11):  # wandb writes in blocks; a killed process loses the last one
        shown = {name: points[name][step][-1] for name in expected[step]}
        assert shown == pytest.approx(expected[step], rel=1e-6, nan_ok=True), step
    updates = [each for one in read_back.wandb_records(files[1]) for each in one.config.update]
    config = {each.key: json.loads(each.value_json) for each in updates}
    assert config["data"]["seq_len"] == 32 and config["last_checkpoint"]["every_n_steps"] == 5
    assert config["environment"]["git_commit"] == git("rev-parse", "HEAD")
    written = [path for path in restarted.rglob("*") if path.is_file()]
    assert not [path for path in written if b"s3cr3t" in path.read_bytes()]
