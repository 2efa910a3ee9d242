"""W&B online: one run over restarts. A service, process or network that is away neither stops nor delays training."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dist_template.observe.loggers import wandb
from dist_template.observe.loggers.wandb import WandB
from tests.support import read_back
from tests.support.wandb_service import Service


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[Service]:
    import wandb as library

    library.teardown()  # what an earlier test set up in this process
    service = Service()
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", service.url)
    yield service
    library.teardown()
    service.close()


def started(run: Path) -> WandB:
    logger = WandB("p", str(run))
    logger.log_hyperparams({"data": {"seq_len": 32}})
    return logger


def log(logger: WandB, steps: range) -> None:
    for step in steps:
        logger.log_metrics({"train/loss": 1 / step}, step)


def exit_process() -> None:
    """What wandb does when the process exits."""
    import wandb as library

    library.finish()
    library.teardown()


@pytest.mark.slow
def test_a_resumed_run_continues_as_the_same_run_online(tmp_path: Path, service: Service) -> None:
    for steps in range(1, 8), range(6, 11):  # resumed from step 5
        log(logger := started(tmp_path / "one"), steps)
        logger.finalize("success")
        exit_process()
    ((name, lines),) = service.lines.items()
    assert name == "one" and service.config["data"]["value"] == {"seq_len": 32}
    losses = [(line["trainer/global_step"], line["train/loss"]) for line in lines if "train/loss" in line]
    assert losses == [(step, 1 / step) for step in (*range(1, 8), *range(6, 11))]
    assert [line["_step"] for line in lines] == sorted({line["_step"] for line in lines}), "W&B dropped none"


def test_a_service_that_goes_away_neither_stops_nor_delays_training(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb, "FINISH_TIMEOUT_S", 3.0)
    log(logger := started(tmp_path / "one"), range(1, 4))
    service.is_away = True
    begun = time.monotonic()
    log(logger, range(4, 7))
    assert time.monotonic() - begun < 20, "training waited"
    logger.finalize("success")
    exit_process()
    assert time.monotonic() - begun < 60, "FINISH_TIMEOUT_S is 3"
    assert set(read_back.wandb_points(tmp_path / "one")["train/loss"]) == set(range(1, 7)), "it can be synced later"


@pytest.mark.slow
def test_wandbs_own_process_may_be_killed(tmp_path: Path, service: Service) -> None:
    code = f"""
import time
import psutil
from dist_template.cluster.exit import exit_process, skip_finalization
skip_finalization()
from dist_template.observe.loggers import wandb
wandb.FINISH_TIMEOUT_S = 3.0
logger = wandb.WandB("p", {str(tmp_path / "one")!r})
for step in range(1, 43):
    logger.log_metrics({{"train/loss": 1.0}}, step)
    time.sleep(0.05 if step > 3 else 0)  # a thread of wandb's notices that the connection has ended
    if step == 3:
        [process.kill() for process in psutil.Process().children(recursive=True) if process.name() == "wandb-core"]
logger.finalize("success")
exit_process(0)"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("UserWarning: W&B has failed (") == 1, ended.stderr


def test_without_a_service_at_the_start_training_continues(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # no service listens there
    monkeypatch.setattr(wandb, "INIT_TIMEOUT_S", 3.0)
    with pytest.warns(UserWarning, match="training continues without it") as warned:
        log(logger := started(tmp_path / "one"), range(1, 7))
    assert len([each for each in warned if "continues without" in str(each.message)]) == 1
    logger.finalize("success")
    exit_process()


def test_an_error_of_wandb_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    logger = WandB("p", str(tmp_path / "r"))
    logger._experiment = SimpleNamespace()  # ty: ignore[invalid-assignment]  (it has no `log`)
    with pytest.warns(UserWarning, match="continues without it") as warned:
        logger.log_metrics({"train/loss": 1.0}, step=1)
        logger.log_metrics({"train/loss": 1.0}, step=2)
    assert len(warned) == 1
