"""A class of the configuration that cannot be made: the key, the class and its own reason."""

import json
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from tests.support.classifier import PLAIN
from tests.support.runs import refused


class Particular(Callback):
    def __init__(self, level: int = 1) -> None:
        if level == 1:
            raise RuntimeError("level 1 is gone. Give 2")
        if level == 3:
            raise KeyError("three")


class Unfinished(Callback, ABC):
    @abstractmethod
    def go(self) -> None: ...


class NoLogger(Logger):
    pass


class Other:
    pass


HERE = __name__
CASES = [
    ("callbacks", "ModelCheckpoint", {"save_top_k": -2}, "save_top_k=-2; Must be >= -1"),
    ("callbacks", "EarlyStopping", {"monitor": "x", "mode": "foo"}, "Stopping refuses .*got foo"),
    ("callbacks", "EarlyStopping", {"moniter": "x"}, "moniter is not an argument of EarlyStoppi"),
    ("callbacks", "EarlyStopping", {}, "EarlyStopping: monitor is missing"),
    ("callbacks", f"{HERE}.Particular", {}, "refuses its .*RuntimeError: level 1 is gone; Give 2"),
    ("callbacks", f"{HERE}.Particular", {"level": 3}, "Particular refuses .* KeyError: 'three'"),
    ("callbacks", f"{HERE}.Particular", {"level": "x"}, "Particular: level is 'x': expected an in"),
    ("callbacks", f"{HERE}.Unfinished", {}, "Unfinished is abstract: .* that defines go"),
    ("callbacks", f"{HERE}.Other", {}, "Other is no subclass of Callback"),
    ("callbacks", f"{HERE}.Nothing", {}, "Nothing cannot be imported: .* has no attribute"),
    ("logger", f"{HERE}.NoLogger", {}, "NoLogger is abstract: .* log_metrics"),
    ("logger", "TensorBoard", {"sav_dir": "x"}, "sav_dir is not an argument of TensorBoard"),
    ("strategy", "DDPStrategy", {"start_method": "x"}, "start_method is 'x': expected one of 'po"),
    ("profiler", "SimpleProfiler", {"dir": "x"}, "dir is not an argument of SimpleProfiler"),
]


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize(("key", "kind", "arguments", "words"), CASES)
def test_why_a_class_is_refused_is_told(
    key: str,
    kind: str,
    arguments: dict[str, Any],
    words: str,
    as_list: bool,
    tmp_path: Path,
    capfd: Any,
) -> None:
    if as_list and key not in ("callbacks", "logger"):
        pytest.skip("one class alone")
    given: Any = {"class_path": kind, "init_args": arguments}
    value = json.dumps([given] if as_list else given)
    flags = [f"--run.root={tmp_path}", "--trainer.max_steps=1", f"--trainer.{key}={value}"]
    sentence = refused("fit", flags, capfd, PLAIN)
    assert f"trainer.{key}: " in sentence, sentence
    assert re.search(words, sentence), sentence
    assert "subtypes" not in sentence and "valid subclass" not in sentence
