"""Every option of LightningCLI and of the Trainer is honoured, and every number has a range."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from inspect import signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import Strategy

from dist_template.cli.defaults import always_on
from dist_template.cli.fit import CLI
from dist_template.strategies import MeshStrategy
from dist_template.text import Source, TokenizerSpec
from tests.support.library import RANGES, keys_of
from tests.support.line import OURS
from tests.support.runs import logged, only_run, run


class Seen(Exception):
    """The Trainer that a command line describes; it is built, and not run."""


@pytest.fixture
def trainer_of(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CLI of `fit` with further flags, before it trains."""

    def stop(self: CLI, subcommand: str) -> None:
        raise Seen(self)

    monkeypatch.setattr(CLI, "_run_subcommand", stop)

    def build(*more: str) -> Any:
        with pytest.raises(Seen) as seen:
            run("fit", *flags, *more)
        return seen.value.args[0]

    return build


# Key: a value, and how the Trainer, the module or the configuration shows that it is honoured.
HONOURED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "seed_everything": ("5", lambda cli: cli.config.fit.seed_everything == 5),
    "weights_only": ("true", lambda cli: cli.config.fit.weights_only is True),
    "optimizer": ("ASGD", lambda cli: "optim.ASGD" in str(cli.model.optim.optimizer)),
    "lr_scheduler": ("ConstantLR", lambda cli: "ConstantLR" in str(cli.model.optim.lr_scheduler)),
    "trainer.accelerator": ("cpu", lambda cli: isinstance(cli.trainer.accelerator, CPUAccelerator)),
    "trainer.strategy": ("ddp", lambda cli: type(cli.trainer.strategy).__name__ == "DDPStrategy"),
    "trainer.devices": ("1", lambda cli: cli.trainer.num_devices == 1),
    "trainer.num_nodes": ("1", lambda cli: cli.trainer.num_nodes == 1),
    "trainer.precision": ("bf16-mixed", lambda cli: cli.trainer.precision == "bf16-mixed"),
    "trainer.logger": ("{class_path: CSVLogger, init_args: {save_dir: x}}", lambda cli: has(
        cli.trainer.loggers, "CSV")),
    "trainer.callbacks": ("[LearningRateMonitor]", lambda cli: has(cli.trainer.callbacks,
        "LearningRateMonitor")),
    "trainer.max_epochs": ("3", lambda cli: cli.trainer.max_epochs == 3),
    "trainer.min_epochs": ("1", lambda cli: cli.trainer.min_epochs == 1),
    "trainer.max_steps": ("9", lambda cli: cli.trainer.max_steps == 9),
    "trainer.min_steps": ("2", lambda cli: cli.trainer.min_steps == 2),
    "trainer.max_time": ("00:01:00:00",
        lambda cli: cli.config_init.fit.preemption.max_time == "00:01:00:00"),
    "trainer.limit_train_batches": ("0.5", lambda cli: cli.trainer.limit_train_batches == 0.5),
    "trainer.limit_val_batches": ("2", lambda cli: cli.trainer.limit_val_batches == 2),
    "trainer.limit_test_batches": ("3", lambda cli: cli.trainer.limit_test_batches == 3),
    "trainer.limit_predict_batches": ("4", lambda cli: cli.trainer.limit_predict_batches == 4),
    "trainer.val_check_interval": ("4", lambda cli: cli.trainer.val_check_interval == 4),
    "trainer.check_val_every_n_epoch": ("1", lambda cli: cli.trainer.check_val_every_n_epoch == 1),
    "trainer.num_sanity_val_steps": ("2", lambda cli: cli.trainer.num_sanity_val_steps == 2),
    "trainer.log_every_n_steps": ("3", lambda cli: cli.trainer.log_every_n_steps == 3),
    "trainer.enable_checkpointing":
        ("false", lambda cli: not has(cli.trainer.callbacks, "LastCheckpoint")),
    "trainer.enable_progress_bar": ("true", lambda cli: has(cli.trainer.callbacks, "ProgressBar")),
    "trainer.enable_model_summary":
        ("true", lambda cli: has(cli.trainer.callbacks, "ModelSummary")),
    "trainer.gradient_clip_val": ("0.5", lambda cli: cli.trainer.gradient_clip_val == 0.5),
    "trainer.gradient_clip_algorithm":
        ("value", lambda cli: cli.trainer.gradient_clip_algorithm == "value"),
    "trainer.deterministic": ("warn",
        lambda cli: torch.is_deterministic_algorithms_warn_only_enabled()),
    "trainer.benchmark": ("true", lambda cli: torch.backends.cudnn.benchmark),
    "trainer.inference_mode": ("false", lambda cli: not cli.trainer.validate_loop.inference_mode),
    "trainer.profiler": ("simple", lambda cli: has([cli.trainer.profiler], "SimpleProfiler")),
    "trainer.detect_anomaly": ("true", lambda cli: cli.trainer._detect_anomaly),
    "trainer.plugins": ("[Plugin]", lambda cli: has([cli.trainer.strategy.cluster_environment],
        "Plugin")),
    "trainer.sync_batchnorm": ("true", lambda cli: cli.trainer.strategy._layer_sync is not None),
    "trainer.reload_dataloaders_every_n_epochs":
        ("1", lambda cli: cli.trainer.reload_dataloaders_every_n_epochs == 1),
    "trainer.default_root_dir": ("/x", lambda cli: cli.trainer.default_root_dir == "/x"),
    "trainer.enable_autolog_hparams": ("false", lambda cli: not cli.trainer.enable_autolog_hparams),
}  # fmt: skip
ELSEWHERE = {"config", "ckpt_path", "trainer.fast_dev_run"}  # test_cli.py, test_runs.py, below
REFUSED = {
    f"trainer.{name}" for name in "overfit_batches barebones accumulate_grad_batches".split()
}
REFUSED |= {"trainer.use_distributed_sampler", "trainer.model_registry"}  # test_sentences.py


class Plugin(LightningEnvironment):
    """A cluster environment of a user's."""


def has(objects: list[Any], name: str) -> bool:
    return any(name in kind.__name__ for one in objects for kind in type(one).__mro__)


def test_every_option_is_in_one_of_the_tables(parser: Any) -> None:
    """A new version of Lightning may have new ones."""
    keys = {action.dest for action in parser._actions if not action.dest.endswith("help")}
    ours = {"model", "data", "run", "cluster", "trainer", "print_config", *always_on()}
    lightnings = {key for key in keys if key.partition(".")[0] not in ours or key[:8] == "trainer."}
    assert lightnings == {*HONOURED, *ELSEWHERE, *REFUSED}


def test_every_option_that_is_not_refused_is_honoured(trainer_of: Any, monkeypatch: Any) -> None:
    flags = [f"--{key}={value}" for key, (value, _) in HONOURED.items()]
    flags = [flag.replace("[Plugin]", f"[{__name__}.Plugin]") for flag in flags]
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    try:
        cli = trainer_of(*flags)
        assert not [key for key, (_, is_honoured) in HONOURED.items() if not is_honoured(cli)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert trainer_of("--trainer.fast_dev_run=2").trainer.fast_dev_run == 2


def test_a_run_trains_by_the_named_optimizer_and_schedule(flags: list[str], tmp_path: Path) -> None:
    chosen = ["--optimizer=torch.optim.SGD", "--optimizer.momentum=0.9", "--lr_scheduler=StepLR"]
    chosen += [
        "--lr_scheduler.step_size=1", "--lr_scheduler.gamma=0.5", "--model.optim.learning_rate=0.5",
    ]  # fmt: skip
    assert run("fit", *flags, *chosen, "--trainer.max_steps=3") == 0
    rates = list(logged(only_run(tmp_path), "train/learning_rate").values())
    assert rates == [0.25, 0.125, 0.0625], "stepped after each optimizer step"
    settings = f"--config={only_run(tmp_path)}/config.yaml"
    assert run("fit", settings, "--trainer.max_steps=4", "--ckpt_path=last") == 0
    assert logged(only_run(tmp_path), "train/learning_rate")[4] == 0.03125


# Lightning checks these itself, and most of them take -1, "auto" or null besides.
LIGHTNINGS = {
    *"max_epochs min_epochs max_steps min_steps max_time fast_dev_run overfit_batches".split(),
    *"limit_val_batches limit_test_batches limit_predict_batches".split(),
    *"plugins accumulate_grad_batches precision".split(),
}
MESH = {f"trainer.strategy.{name}" for name in signature(MeshStrategy).parameters}  # its own
CHECKED = {"preemption.max_time", "data.source.weights", "data.source.schedule"}
CHECKED |= {"data.tokenizer.vocab_size"}
WITHOUT = {f"trainer.{name}" for name in LIGHTNINGS} | CHECKED | MESH
CLASSES = {  # what `class_path` names
    "data.source": Source, "data.tokenizer": TokenizerSpec, "trainer.strategy": Strategy,
    "trainer.logger": Logger,
}  # fmt: skip


class Parsed(Exception):
    pass


def numeric(hint: Any, key: str) -> Iterator[str]:
    """Yields the keys of a type that take a number, in dataclasses, lists and unions of numbers."""
    if hint in (int, float):
        yield key
    elif is_dataclass(hint):
        hints = get_type_hints(hint)
        for field in fields(hint):
            if field.init:
                yield from numeric(hints[field.name], f"{key}.{field.name}")
    for one in get_args(hint):
        yield from numeric(one, key)


def below(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        if one.__module__.startswith("dist_template.") and "__init__" in vars(one):
            yield one
        yield from below(one)


@pytest.fixture
def parser(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def parse(self: Any, parser: Any, args: Any) -> None:
        raise Parsed(self._subcommand_parsers["fit"])

    monkeypatch.setattr(CLI, "parse_arguments", parse)
    OURS.start()
    with pytest.raises(Parsed) as parsed:
        CLI(OURS, ["fit", *flags], run=True)
    return parsed.value.args[0]


def test_every_numeric_key_has_a_range_that_its_default_is_in(parser: Any) -> None:
    """A number in a class of `class_path` is checked by that class."""
    found = set()
    for action in keys_of(parser):
        hint = getattr(action, "_typehint", None) or action.type
        if hint is not None and not action.dest.endswith(".help"):
            found |= {*numeric(hint, action.dest)} - WITHOUT
        default = action.default
        for value in default if isinstance(default, tuple) else [default]:
            if action.dest in RANGES and isinstance(value, int | float):
                assert RANGES[action.dest][1] <= value <= RANGES[action.dest][2], action.dest
    for section, base in CLASSES.items():
        for kind in below(base):
            for name, hint in get_type_hints(kind.__init__).items():
                found |= {*numeric(hint, f"{section}.{name}")} - WITHOUT
    of_torch = ("lr_scheduler.", "optimizer.")
    assert found == {key for key in RANGES if not key.startswith(of_torch)}
    assert all(math.isfinite(least) and math.isfinite(most) for _, least, most in RANGES.values())
