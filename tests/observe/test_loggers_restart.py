"""TensorBoard and WandB hold what metrics.jsonl holds, at the same steps, also after a crash and a restart."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
from lightning.pytorch import Callback
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.custom_scalar import layout_pb2

from dist_template.cluster.environment import git
from dist_template.observe.loggers.tensorboard import LAYOUT, TensorBoard
from tests.support import read_back
from tests.support.runs import CONFIGS, StopAfter, Workers, run_in_subprocess

MEASURED = ("perf/", "memory/", "gpu/", "rank/", "health/")  # may differ when a step is done again


class KillAfter(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module", params=[StopAfter(7), KillAfter(7)], ids=["crashed", "killed"])
def restarted(
    request: pytest.FixtureRequest, corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run with all loggers that ended in step 7 and went on from step 5."""
    folder = tmp_path_factory.mktemp("restarted")
    both = folder / "both.yaml"
    text = (CONFIGS / "logger" / "wandb.yaml").read_text("utf-8")
    both.write_text(text.replace("  logger:\n", "  logger:\n    - class_path: TensorBoard\n"), "utf-8")
    flags = [f"--config={CONFIGS}/quickstart.yaml", f"--config={both}", f"--run.root={folder}", "--run.name=r"]
    flags += ["--data.source=TextFiles", f"--data.source.paths=[{corpus}/*.txt]", "--data.tokenizer=Bytes"]
    flags += [f"--data.cache_dir={cache}", "--data.seq_len=32", "--data.validation_share=0.2", "--data.test_share=0"]
    flags += ["--data.global_batch_size=4", "--data.micro_batch_size=2", "--model.sample_tokens=4"]
    flags += ["--trainer.max_steps=10", "--trainer.log_every_n_steps=1", "--trainer.val_check_interval=5"]
    flags += ["--last_checkpoint.every_n_steps=5", "--trainer.accelerator=cpu", "--trainer.devices=1"]
    assert run_in_subprocess("prepare", *flags).returncode == 0
    with Workers(1) as workers:
        first = workers.run(["fit", *flags], folder / "first", callbacks=[request.param], run_id="one", prelude=offline)
        assert "stopped by the test" in first.error or first.was_killed
    second = run_in_subprocess("fit", *flags, DIST_RUN_ID="one", WANDB_MODE="offline")  # ends as a process does
    assert second.returncode == 0, second.stderr
    return folder / "r" / "one"


def offline() -> None:
    os.environ["WANDB_MODE"] = "offline"


@pytest.mark.slow
@pytest.mark.parametrize("read", [read_back.tensorboard_points, read_back.wandb_points], ids=["tensorboard", "wandb"])
def test_every_metric_stands_at_its_steps_once_also_after_a_restart(restarted: Path, read: Any) -> None:
    points, expected = read(restarted), read_back.metrics(restarted)
    assert set(points["train/loss"]) == set(range(1, 11)) and set(points["eval/loss"]) == {0, 5, 10}
    for step, metrics in expected.items():
        shown = {name: points[name][step][-1] for name in metrics}
        assert shown == pytest.approx(metrics, rel=1e-6, nan_ok=True), step  # TensorBoard has float32
    for name in (name for name in points if not name.startswith(MEASURED)):
        # A killed process may or may not have reached WandB's file: the next attempt logs the same values again.
        once = all(len(values) == 1 for values in points[name].values())
        same = read is read_back.wandb_points and all(len(set(values)) == 1 for values in points[name].values())
        assert once or same, f"{name} stands twice"


@pytest.mark.slow
def test_wandb_knows_configuration_commit_and_command_and_goes_on_as_one_run(restarted: Path) -> None:
    files = read_back.wandb_files(restarted)
    assert len(files) == 2 and all(file.name == "run-one.wandb" for file in files)
    config = read_back.wandb_config(files[1])
    assert config["data"]["seq_len"] == 32 and config["last_checkpoint"]["every_n_steps"] == 5
    assert config["environment"]["git_commit"] == git("rev-parse", "HEAD")
    assert config["environment"]["command"] == json.loads((restarted / "environment.json").read_text())["command"]


@pytest.mark.slow
def test_tensorboard_has_the_charts_the_configuration_and_the_samples(restarted: Path) -> None:
    events = read_back.tensorboard(restarted)
    layout = layout_pb2.Layout.FromString(  # ty: ignore[missing-attribute]
        events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    )
    assert [category.title for category in layout.category] == list(LAYOUT)
    texts = {
        tag.removesuffix("/text_summary"): tag for tag in events.Tags()["tensors"] if tag.endswith("/text_summary")
    }
    assert {"run/config", "run/environment", "eval/sample"} <= set(texts)
    config = events.Tensors(texts["run/config"])[-1].tensor_proto.string_val[0].decode()
    assert "global_batch_size: 4" in config
    assert {sample.step for sample in events.Tensors(texts["eval/sample"])} == {5, 10}


def test_tensorboard_calls_a_run_by_its_name_and_id(tmp_path: Path) -> None:
    logger = TensorBoard(str(tmp_path / "quickstart" / "one"))
    logger.log_metrics({"train/loss": 0.0}, step=1)
    logger.finalize("success")
    assert set(EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Runs()) == {"quickstart/one"}


@pytest.mark.parametrize("ends", [TensorBoard.save, lambda logger: logger.finalize("failed")], ids=["save", "failure"])
def test_tensorboards_thread_is_left_asleep_between_log_steps_and_nothing_is_lost(tmp_path: Path, ends: Any) -> None:
    logger = TensorBoard(str(tmp_path))
    writer: Any = logger.experiment._get_file_writer().event_writer
    logger.log_metrics({"train/loss": 0.0}, step=0)  # the first is shown at once
    with patch.object(writer, "add_event", wraps=writer.add_event) as woken:
        for step in range(1, 50):
            logger.log_metrics({"train/loss": float(step)}, step=step)
        assert not woken.called
        ends(logger)
    assert read_back.tensorboard_points(tmp_path)["train/loss"] == {step: [float(step)] for step in range(50)}
