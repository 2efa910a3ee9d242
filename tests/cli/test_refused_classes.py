"""A class of the configuration that cannot be made: the key, the class and its own reason."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from dist_template.errors import InputError
from dist_template.project import Project
from dist_template.ranges import PositiveInt
from dist_template.text import Bytes, NextToken, Source
from tests.support.classifier import PLAIN, Classifier
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


class PickyObjective(NextToken):
    def __init__(self, level: PositiveInt, mode: str = "") -> None:
        if level == 1:
            raise ValueError("level 1 is gone. Give 2")
        if level == 3:
            raise InputError("model.objective.level is 3; give 2")
        if level == 4:
            raise KeyError("four")


class PickySource(Source):
    def __init__(self, level: PositiveInt, mode: str = "") -> None:
        PickyObjective(level, mode)

    def documents(self) -> Iterator[tuple[str, str]]:
        yield "name", "text"


class PickyTokenizer(Bytes):
    def __init__(self, level: PositiveInt, mode: str = "") -> None:
        PickyObjective(level, mode)


class PickyOptimizer(SGD):
    def __init__(self, params: Any, level: PositiveInt, mode: str = "") -> None:
        PickyObjective(level, mode)
        super().__init__(params, 1.0)


class PickySchedule(StepLR):
    def __init__(self, optimizer: Any, level: PositiveInt, mode: str = "") -> None:
        PickyObjective(level, mode)
        super().__init__(optimizer, 1)


class Metric:
    def __init__(self, level: PositiveInt, mode: str = "") -> None:
        PickyObjective(level, mode)


class WithMetric(Classifier):
    """Somebody's own module, whose metric is chosen in YAML."""

    def __init__(self, metrics: list[Metric] | None = None, metric: Metric | None = None) -> None:
        super().__init__()


HERE = __name__
CASES = [
    ("callbacks", "ModelCheckpoint", {"save_top_k": -2}, "save_top_k=-2; Must be >= -1"),
    ("callbacks", "EarlyStopping", {"monitor": "x", "mode": "foo"}, "Stopping refuses .*got foo"),
    ("callbacks", "EarlyStopping", {"moniter": "x"}, "moniter is not an argument of EarlyStoppi"),
    ("callbacks", "EarlyStopping", {}, "monitor is missing: EarlyStopping has no default for it"),
    ("callbacks", f"{HERE}.Particular", {}, "refuses its .*RuntimeError: level 1 is gone; Give 2"),
    ("callbacks", f"{HERE}.Particular", {"level": 3}, "Particular refuses .* KeyError: 'three'"),
    ("callbacks", f"{HERE}.Particular", {"level": "x"}, "level is 'x': expected an integer"),
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
    where = rf"trainer.{key}\[0\](\.init_args\.\w+)?" if as_list else rf"trainer.{key}(\.\w+)?"
    if "cannot be imported" in words or "abstract" in words or "no subclass" in words:
        where = f"trainer.{key}"  # the class's name says which
    assert re.match(f"error: {where}(: | is )", sentence), sentence
    assert re.search(words, sentence), sentence
    assert "subtypes" not in sentence and "valid subclass" not in sentence


LEVELS = {  # arguments: what is said of {key}, which is of {kind}
    "level: 1": "{key}: {kind} refuses its arguments: level 1 is gone; Give 2",
    "level: 3": "model.objective.level is 3; give 2",
    "level: 4": "{key}: {kind} refuses its arguments: KeyError: 'four'",
    "level: 0": "{key}.level is 0; give 1 or more",
    "level: x": "{key}.level is 'x': expected an integer",
    "mode: x": "{key}.level is missing: {kind} has no default for it",
    "levle: 2": "{key}.levle is not an argument of {kind}; did you mean {key}.level?",
    "zzz: 2": "{key}.zzz is not an argument of {kind}; it takes level, mode",
}


def every_sentence(flag: str, kind: type, flags: list[str], capfd: Any, given: Any) -> None:
    for arguments, words in LEVELS.items():
        value = f"{{class_path: {HERE}.{kind.__name__}, init_args: {{{arguments}}}}}"
        key = flag
        if is_list := flag.endswith("[1]"):
            value = f"[{{class_path: {HERE}.{kind.__name__}, init_args: {{level: 2}}}}, {value}]"
            key = f"{flag}.init_args"
        sentence = refused("fit", [*flags, f"--{flag.removesuffix('[1]')}={value}"], capfd, *given)
        words = words.replace("{key}:", f"{flag}:") if is_list else words
        words = words.format(key=key, kind=kind.__name__)
        assert sentence.startswith(f"error: {words}"), sentence


@pytest.mark.parametrize(
    ("flag", "kind"),
    [
        ("model.objective", PickyObjective),
        ("data.source", PickySource),
        ("data.tokenizer", PickyTokenizer),
    ],
)
def test_what_the_constructor_of_a_users_class_raises_is_one_sentence(
    flag: str, kind: type, flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    every_sentence(flag, kind, _without_source(flags), capfd, ())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("flag", ["model.metric", "model.metrics[1]"])
def test_a_class_that_a_users_module_takes_is_checked_likewise(
    flag: str, tmp_path: Path, capfd: Any
) -> None:
    project = Project(PLAIN.package, f"{HERE}:WithMetric", PLAIN.data)
    flags = [f"--run.root={tmp_path}", "--trainer.max_steps=1"]
    every_sentence(flag, Metric, flags, capfd, (project,))


@pytest.mark.parametrize(
    ("flag", "kind"), [("optimizer", PickyOptimizer), ("lr_scheduler", PickySchedule)]
)
def test_what_an_optimizer_or_a_schedule_raises_is_one_sentence(
    flag: str, kind: type, flags: list[str], capfd: Any
) -> None:
    """They are built after the module, and leave no run."""
    for level, words in {1: "level 1 is gone", 4: "KeyError: 'four'"}.items():
        given = [*flags, f"--{flag}={HERE}.{kind.__name__}", f"--{flag}.level={level}"]
        sentence = refused("fit", given, capfd)
        assert f"--{flag} {kind.__name__}: {words}; give other arguments" in sentence, sentence


def test_a_class_of_a_mixture_has_the_key_of_its_source(flags: list[str], capfd: Any) -> None:
    source = f"{{class_path: {HERE}.PickySource, init_args: {{level: LEVEL}}}}"
    value = f"{{class_path: Mixture, init_args: {{sources: {{a: {source}}}, weights: {{a: 1}}}}}}"
    for level, words in {
        "1": ": PickySource refuses",
        "0": ".level is 0",
        "x": ".level is 'x'",
    }.items():
        flag = f"--data.source={value.replace('LEVEL', level)}"
        sentence = refused("fit", [*_without_source(flags), flag], capfd)
        assert sentence.startswith(f"error: data.source.sources.a{words}"), sentence


def _without_source(flags: list[str]) -> list[str]:
    """Returns a training's flags without those of its source and tokenizer."""
    return [flag for flag in flags if not flag.startswith(("--data.source", "--data.tokenizer"))]
