"""The hooks of a run: their order at a log step, and classes that have one and are not called."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from dist_template import RunCallback, RunLogger
from dist_template.callbacks.training_log import TrainingLog
from dist_template.run_callback import unheard
from tests.support.classifier import Images, PlainClassifier


class Notes(RunCallback):
    """Notes each call of a hook in `calls`, with the names of the metrics."""

    def __init__(self, name: str, calls: list[tuple[str, str, bool]]) -> None:
        self.name, self.calls = name, calls

    def before_log_step(self, trainer: Any, module: Any) -> None:
        self.calls.append((self.name, "before_log_step", False))

    def add_metrics(self, trainer: Any, module: Any, metrics: dict[str, float]) -> None:
        self.calls.append((self.name, "add_metrics", "of_first" in metrics))
        if self.name == "first":
            metrics["of_first"] = 1.0

    def on_log_step(self, trainer: Any, module: Any, metrics: dict[str, float]) -> None:
        self.calls.append((self.name, "on_log_step", "of_first" in metrics))


class NotesLogger(CSVLogger):
    def __init__(self, folder: Path, calls: list[tuple[str, str, bool]]) -> None:
        super().__init__(folder)
        self.calls = calls

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.calls.append(("logger", "log_metrics", "of_first" in metrics))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_hooks_are_called_in_the_declared_order(place: int, tmp_path: Path) -> None:
    """Wherever the training log stands among the callbacks."""
    calls: list[tuple[str, str, bool]] = []
    callbacks: list[Callback] = [Notes("first", calls), Notes("second", calls)]
    callbacks.insert(place, TrainingLog())
    off: Any = dict.fromkeys(["enable_progress_bar", "enable_model_summary"], False)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=1,
        log_every_n_steps=1,
        limit_val_batches=0,
        logger=NotesLogger(tmp_path, calls),
        callbacks=callbacks,
        enable_checkpointing=False,
        **off,
    )
    trainer.fit(PlainClassifier(), Images())
    assert calls[:7] == [  # then Lightning logs what the module has logged
        ("first", "before_log_step", False),
        ("second", "before_log_step", False),
        ("first", "add_metrics", False),
        ("second", "add_metrics", True),
        ("logger", "log_metrics", True),
        ("first", "on_log_step", True),
        ("second", "on_log_step", True),
    ]


class Forgotten(Callback):
    def on_log_step(self, trainer: Any, module: Any, metrics: dict[str, float]) -> None:
        raise AssertionError("it is not called")


class Heard(RunLogger, CSVLogger):
    def on_resume(self, step: int) -> None: ...


class Unheard(CSVLogger):
    def log_sample(self, text: str, step: int) -> None: ...


def test_a_class_that_is_not_called_is_named(tmp_path: Path) -> None:
    loggers = [Heard(tmp_path), Unheard(tmp_path)]
    trainer = L.Trainer(callbacks=[Forgotten()], logger=loggers, enable_checkpointing=False)
    assert [*unheard(trainer)] == [
        "note: Forgotten.on_log_step is not called: derive Forgotten from"
        " dist_template.RunCallback if it is meant for a run",
        "note: Unheard.log_sample is not called: derive Unheard from dist_template.RunLogger if"
        " it is meant for a run",
    ]
