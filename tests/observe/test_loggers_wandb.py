"""WandB online: one run over restarts; and a service, a process or a network that is away does not touch training."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
from lightning.pytorch import Callback

from dist_template.cli.fit import CLI
from dist_template.observe.loggers.artifacts import Uploads
from dist_template.observe.loggers.wandb import WandB
from tests.support import read_back
from tests.support.runs import logged, only_run, run, run_in_subprocess
from tests.support.wandb_service import Service

QUICK = ["--trainer.max_steps=6", "--model.optim.warmup=1", "--last_checkpoint.every_n_steps=4"]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[Service]:
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


def config(tmp_path: Path, **arguments: Any) -> str:
    given = {"project": "p", "save_dir": "{run}", "init_timeout_s": 20, "finish_timeout_s": 3, **arguments}
    logger = {"class_path": "WandB", "init_args": given}
    path = tmp_path / "wandb.yaml"
    path.write_text(json.dumps({"trainer": {"logger": [logger]}}), "utf-8")
    return f"--config={path}"


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_the_same_run_online(flags: list[str], tmp_path: Path, service: Service) -> None:
    flags = [*flags, config(tmp_path, finish_timeout_s=20), *QUICK]
    assert run("fit", *flags, "--trainer.max_steps=4") == 0
    finish()
    assert run("fit", *flags, "--ckpt_path=last") == 0
    finish()
    ((name, lines),) = service.lines.items()
    assert name == only_run(tmp_path).name
    losses = {line["trainer/global_step"]: line["train/loss"] for line in lines if "train/loss" in line}
    assert losses == pytest.approx(logged(only_run(tmp_path), "train/loss"))
    assert len(losses) == sum("train/loss" in line for line in lines), "a step stands twice"
    assert [line["_step"] for line in lines] == sorted({line["_step"] for line in lines}), "WandB dropped none"
    assert service.config["environment"]["value"]["command"] and service.config["data"]["value"]["seq_len"] == 32


def finish() -> None:
    """As the end of the process does."""
    import wandb

    wandb.finish()
    wandb.teardown()


class GoAway(Callback):
    """After step 3; without a service it is WandB's own process that goes."""

    def __init__(self, service: Service | None = None) -> None:
        self.service = service

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == 3 and self.service is not None:
            self.service.is_away = True
        elif trainer.global_step == 3:
            for process in psutil.Process().children(recursive=True):
                if process.name() == "wandb-core":
                    process.send_signal(signal.SIGKILL)


@pytest.mark.slow
def test_a_service_that_goes_away_in_mid_run_neither_stops_nor_delays_training(
    flags: list[str], tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CLI.instantiate_trainer

    def with_fault(self: Any, **kwargs: Any) -> Any:
        trainer = real(self, **kwargs)
        trainer.callbacks.append(GoAway(service))  # ty: ignore[missing-attribute]
        return trainer

    monkeypatch.setattr(CLI, "instantiate_trainer", with_fault)
    assert run("fit", *flags, config(tmp_path), *QUICK) == 0
    begun = time.monotonic()
    finish()
    assert time.monotonic() - begun < 15, "finish_timeout_s is 3"
    assert set(logged(only_run(tmp_path), "train/loss")) == set(range(1, 7))
    points = read_back.wandb_points(only_run(tmp_path))
    assert set(points["train/loss"]) == set(range(1, 7)), "the file can be synced later"


@pytest.mark.slow
def test_wandbs_own_process_may_be_killed(flags: list[str], tmp_path: Path, service: Service) -> None:
    fault = f"--trainer.callbacks+={__name__}.GoAway"
    begun = time.monotonic()
    ended = run_in_subprocess("fit", *flags, config(tmp_path), *QUICK, fault)
    assert ended.returncode == 0, ended.stderr
    assert time.monotonic() - begun < 60
    told = re.findall(r"WandB has failed \(.*?(?:Connection lost|Connection reset)", ended.stderr)
    assert len(told) == 1, ended.stderr
    assert set(logged(only_run(tmp_path), "train/loss")) == set(range(1, 7))


@pytest.mark.slow
def test_a_wandb_service_that_was_never_there_means_logging_offline(
    flags: list[str], tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    with pytest.warns(UserWarning, match="logging offline"):
        assert run("fit", *flags, config(tmp_path, init_timeout_s=3), *QUICK) == 0
    finish()
    assert set(read_back.wandb_points(only_run(tmp_path))["train/loss"]) == set(range(1, 7))


class FakeRun:
    """Takes artifacts when it is told to."""

    id, resumed = "r", False

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.alerts: list[tuple[str, ...]] = []
        self.may = threading.Event()

    def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
        object.__setattr__(artifact, "wait", lambda _: self.may.wait(120))
        paths = {name: entry.local_path for name, entry in artifact.manifest.entries.items()}
        read = {name: Path(path).read_text() for name, path in paths.items()}
        self.taken.append({"name": artifact.name, "aliases": aliases, "files": read})

    def alert(self, *told: str) -> None:
        self.alerts.append(told)


def checkpoint(folder: Path, name: str) -> Path:
    (folder / name / "part").mkdir(parents=True)
    (folder / name / "part" / "weights").write_text(name)
    return folder / name


def test_checkpoints_are_uploaded_behind_training_and_outlive_their_deletion(tmp_path: Path) -> None:
    import shutil

    fake, uploads = FakeRun(), Uploads(tmp_path / ".uploads")
    begun = time.monotonic()
    for step in (1, 2, 3):  # 1 is being uploaded, 2 waits until 3 takes its place
        path = checkpoint(tmp_path, f"step{step}.ckpt")
        uploads.begin(fake, path, "last")
        while step == 1 and not fake.taken:
            time.sleep(0.01)
        shutil.rmtree(path)
    uploads.begin(fake, checkpoint(tmp_path, "best-step3.ckpt"), "best")
    assert time.monotonic() - begun < 60, "training waited for an upload"
    with pytest.warns(UserWarning, match="has not taken all"):
        uploads.wait(0.05)
    fake.may.set()
    uploads.wait(10)
    names = [each["aliases"][1] for each in fake.taken]
    assert names == ["step1", "step3", "best-step3"]
    assert [each["files"] for each in fake.taken] == [{"part/weights": f"{name}.ckpt"} for name in names]
    assert not any((tmp_path / ".uploads").iterdir()), "the links are let go"


def logger_of(fake: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> WandB:
    monkeypatch.setenv("WANDB_MODE", "online")
    logger = WandB("p", str(tmp_path / "r"), **arguments)
    logger._experiment = fake  # ty: ignore[invalid-assignment]
    return logger


def test_artifacts_are_a_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, expected in {"none": 0, "best": 1, "last": 1, "all": 2}.items():
        fake = FakeRun()
        fake.may.set()
        logger = logger_of(fake, tmp_path, monkeypatch, artifacts=kind)
        for name in ("step1.ckpt", "best-step1.ckpt"):
            logger.on_checkpoint(checkpoint(tmp_path / kind, name))
        if logger._uploads:
            logger._uploads.wait(10)
        assert len(fake.taken) == expected, kind


def test_alerts_tell_of_a_crash_and_of_the_end_and_are_a_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRun()
    monkeypatch.setattr(WandB, "_finish", lambda _: None)
    logger = logger_of(fake, tmp_path, monkeypatch, alerts=True)
    logger._trains = True
    logger.finalize("success")
    logger.finalize("success")  # of the validation after training: nothing new
    try:
        raise RuntimeError("out of luck\nmore")
    except RuntimeError:
        logger.finalize("failed")
    assert [told[0] for told in fake.alerts] == ["training is done", "training has failed"]
    assert "out of luck" in fake.alerts[1][1]
    quiet = logger_of(other := FakeRun(), tmp_path, monkeypatch)
    quiet.alert("title", "text")
    assert other.alerts == []


def test_whatever_wandb_raises_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logger_of(FakeRun(), tmp_path, monkeypatch)  # it has no `log`
    with pytest.warns(UserWarning, match="goes on without it") as told:
        logger.log_metrics({"train/loss": 1.0}, step=1)
        logger.log_metrics({"train/loss": 1.0}, step=2)
    assert len(told) == 1
