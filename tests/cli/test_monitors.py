"""A monitor that nothing logs: a sentence with the monitor, where it is set, and what is logged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from dist_template.callbacks.monitors import Monitors
from dist_template.cli import main as command_line
from dist_template.errors import InputError
from dist_template.project import Project
from tests.support.classifier import PLAIN, PlainClassifier
from tests.support.runs import refused


class WithPlateau(PlainClassifier):
    strict = True

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        schedule = {"scheduler": plateau, "monitor": "nope", "strict": self.strict}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Brings(PlainClassifier):
    def configure_callbacks(self) -> Any:
        return EarlyStopping("nope", check_on_train_epoch_end=True)


def of(module: type) -> Project:
    return Project("tests.support", f"{__name__}:{module.__name__}", ".classifier:Images")


def callback(name: str, **arguments: Any) -> list[str]:
    given = {"class_path": name, "init_args": {"monitor": "nope", **arguments}}
    return [f"--trainer.callbacks={json.dumps([given])}"]


HERE = "its monitor in trainer.callbacks"
CASES: list[tuple[Project, list[str], str, str]] = [
    (PLAIN, callback("EarlyStopping"), "EarlyStopping monitors", HERE),
    (PLAIN, callback("EarlyStopping", check_on_train_epoch_end=True), "EarlyStopping mon", HERE),
    (PLAIN, callback("ModelCheckpoint"), "ModelCheckpoint monitors", HERE),
    (of(Brings), [], "EarlyStopping monitors", "Brings.configure_callbacks"),
    (of(WithPlateau), [], "Plateau monitors", "the monitor in WithPlateau.configure_optimizers"),
    (PLAIN, ["--best_checkpoint.monitor=nope"], "best_checkpoint.monitor", "val_loss"),
]


def flags(folder: Path) -> list[str]:
    given = f"""--run.root={folder} --run.report=false --trainer.accelerator=cpu
        --trainer.devices=1 --trainer.max_epochs=1 --trainer.limit_train_batches=2
        --trainer.limit_val_batches=1 --trainer.enable_progress_bar=false"""
    return given.split()


@pytest.mark.slow
@pytest.mark.parametrize(("project", "given", "who", "where"), CASES)
def test_a_monitor_that_nothing_logs_is_named(
    project: Project, given: list[str], who: str, where: str, tmp_path: Path, capfd: Any
) -> None:
    sentence = refused("fit", [*flags(tmp_path), *given], capfd, project)
    assert who in sentence and "'nope'" in sentence
    assert where in sentence and "val_loss" in sentence
    assert not [*tmp_path.rglob("crash")]


@pytest.mark.slow
def test_a_lenient_monitor_trains_on_as_with_lightning(tmp_path: Path) -> None:
    given = callback("EarlyStopping", strict=False)
    assert command_line.command(["fit", *flags(tmp_path), *given], PLAIN) == 0


def test_the_schedule_of_a_flag_is_edited_there() -> None:
    monitors = Monitors([], "--lr_scheduler.monitor")
    with pytest.raises(InputError, match="logged are eval/loss: edit --lr_scheduler.monitor, or"):
        monitors.refuse(None, "x", {"eval/loss": 1.0})


def test_counters_of_a_checkpoint_are_no_metrics() -> None:
    saver = ModelCheckpoint(monitor="x")
    with pytest.raises(InputError, match="logged are nothing"):
        Monitors([saver], "").refuse(saver, "x", {"epoch": 1, "step": 2})
