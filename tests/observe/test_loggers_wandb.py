"""W&B online: one run over restarts; a service that is away neither stops nor delays training."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from dist_template.observe.loggers.wandb import Uploads, WandB
from tests.support import read_back
from tests.support.wandb_service import Service


@pytest.fixture
def service(monkeypatch: MonkeyPatch, tmp_path: Path) -> Generator[Service]:
    import wandb

    wandb.teardown()  # what an earlier test set up in this process
    service = Service()
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", service.url)
    yield service
    wandb.teardown()
    service.close()


def started(run: Path, init_timeout_s: float = 20, finish_timeout_s: float = 20) -> WandB:
    logger = WandB("p", str(run), init_timeout_s=init_timeout_s, finish_timeout_s=finish_timeout_s)
    logger.log_hyperparams({"data": {"seq_len": 32}})
    return logger


def log(logger: WandB, steps: range) -> None:
    for step in steps:
        logger.log_metrics({"train/loss": 1 / step}, step)


def exit_process() -> None:
    """What wandb does when the process exits."""
    import wandb

    wandb.finish()
    wandb.teardown()


@pytest.mark.slow
def test_a_resumed_run_continues_as_the_same_run_online(tmp_path: Path, service: Service) -> None:
    for steps in range(1, 8), range(6, 11):  # resumed from step 5
        log(logger := started(tmp_path / "one"), steps)
        logger.finalize("success")
        exit_process()
    ((name, lines),) = service.lines.items()
    assert name == "one" and service.config["data"]["value"] == {"seq_len": 32}
    steps = [line["trainer/global_step"] for line in lines if "train/loss" in line]
    assert steps == [*range(1, 8), *range(6, 11)]
    assert [line["_step"] for line in lines] == sorted({line["_step"] for line in lines})


def test_a_service_that_goes_away_does_not_delay(tmp_path: Path, service: Service) -> None:
    log(logger := started(tmp_path / "one", finish_timeout_s=3), range(1, 4))
    service.is_away = True
    begun = time.monotonic()
    log(logger, range(4, 7))
    logger.log_sample("text", 6)
    assert time.monotonic() - begun < 20, "training waited"
    logger.finalize("success")
    exit_process()
    assert time.monotonic() - begun < 60, "finish_timeout_s is 3"
    assert set(read_back.wandb_points(tmp_path / "one")["train/loss"]) == set(range(1, 7))


def test_without_a_service_at_the_start_wandb_logs_offline(
    tmp_path: Path, service: Service, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # no service listens there
    with pytest.warns(UserWarning, match="logging offline"):
        log(logger := started(tmp_path / "one", init_timeout_s=3), range(1, 7))
    logger.finalize("success")
    exit_process()
    assert set(read_back.wandb_points(tmp_path / "one")["train/loss"]) == set(range(1, 7))


class FakeRun:
    """Accepts artifacts, each once `may` is set."""

    id = "r"

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.outlived: list[str] = []
        self.may = threading.Event()

    def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
        object.__setattr__(artifact, "wait", lambda _: self._wait(artifact))
        paths = {name: entry.local_path for name, entry in artifact.manifest.entries.items()}
        read = {name: Path(path).read_text() for name, path in paths.items()}
        self.taken.append({"name": artifact.name, "aliases": aliases, "files": read})

    def _wait(self, artifact: Any) -> None:
        assert self.may.wait(120)
        entries = artifact.manifest.entries.values()
        self.outlived += [Path(entry.local_path).read_text() for entry in entries]


def checkpoint(folder: Path, name: str) -> Path:
    (folder / name / "part").mkdir(parents=True)
    (folder / name / "part" / "weights").write_text(name)
    return folder / name


def test_checkpoints_may_be_deleted_while_they_are_uploaded(tmp_path: Path) -> None:
    fake, uploads = FakeRun(), Uploads()
    for step in (1, 2, 3):  # 1 is being uploaded, 2 waits until 3 replaces it
        path = checkpoint(tmp_path, f"step{step}.ckpt")
        uploads.add(fake, path, "last")
        while step == 1 and not fake.taken:
            time.sleep(0.01)
        if step < 3:
            shutil.rmtree(path)
    uploads.add(fake, checkpoint(tmp_path, "best-step3.ckpt"), "best")
    with pytest.warns(UserWarning, match="has not received all"):
        uploads.wait(0.05)
    fake.may.set()
    uploads.wait(10)
    assert [each["aliases"][1] for each in fake.taken] == ["step1", "best-step3", "step3"]
    names = ["step1.ckpt", "best-step3.ckpt", "step3.ckpt"]
    assert [each["files"]["part/weights"] for each in fake.taken] == fake.outlived == names
    assert not (tmp_path / ".uploads").exists()


def test_an_error_of_wandb_is_one_warning(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    logger = WandB("p", str(tmp_path / "r"))
    logger._experiment = FakeRun()  # ty: ignore[invalid-assignment]  # it has no `log`
    with pytest.warns(UserWarning, match="continues without it") as warned:
        logger.log_metrics({"train/loss": 1.0}, step=1)
        logger.log_metrics({"train/loss": 1.0}, step=2)
    assert len(warned) == 1
