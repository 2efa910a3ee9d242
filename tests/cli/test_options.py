"""Every option of LightningCLI and of the Trainer: honoured, or refused with a sentence that says what to use."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import LightningEnvironment

from dist_template.cli.defaults import always_on
from dist_template.cli.fit import CLI
from tests.support.library import optim
from tests.support.runs import logged, only_run, run


class Seen(Exception):
    """The Trainer that a command line describes; it is built, and not run."""


@pytest.fixture
def trainer_of(flags: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """The CLI of `fit` with further flags, before it trains; or the sentence that refuses them."""

    def stop(self: CLI, subcommand: str) -> None:
        raise Seen(self)

    monkeypatch.setattr(CLI, "_run_subcommand", stop)

    def build(*more: str) -> Any:
        try:
            code = run("fit", *flags, *more)
        except Seen as seen:
            return seen.args[0]
        except SystemExit as stopped:
            code = stopped.code
        shown = capfd.readouterr().err
        assert code == 2 and shown.count("error: ") == 1 and "Traceback" not in shown, shown
        return next(line for line in shown.splitlines() if line.startswith("error: "))

    return build


# Key: a value, and how the Trainer, the module or the configuration shows that it is honoured.
HONOURED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "seed_everything": ("5", lambda cli: cli.config.fit.seed_everything == 5),
    "weights_only": ("true", lambda cli: cli.config.fit.weights_only is True),
    "optimizer": ("ASGD", lambda cli: cli.model.optim.optimizer["class_path"] == "torch.optim.ASGD"),
    "lr_scheduler": ("ConstantLR", lambda cli: "ConstantLR" in cli.model.optim.lr_scheduler["class_path"]),
    "trainer.accelerator": ("cpu", lambda cli: isinstance(cli.trainer.accelerator, CPUAccelerator)),
    "trainer.strategy": ("ddp", lambda cli: type(cli.trainer.strategy).__name__ == "DDPStrategy"),
    "trainer.devices": ("1", lambda cli: cli.trainer.num_devices == 1),
    "trainer.num_nodes": ("1", lambda cli: cli.trainer.num_nodes == 1),
    "trainer.precision": ("bf16-mixed", lambda cli: cli.trainer.precision == "bf16-mixed"),
    "trainer.logger": (
        "{class_path: CSVLogger, init_args: {save_dir: x}}",
        lambda cli: has(cli.trainer.loggers, "CSV"),
    ),
    "trainer.callbacks": ("[LearningRateMonitor]", lambda cli: has(cli.trainer.callbacks, "LearningRateMonitor")),
    "trainer.max_epochs": ("3", lambda cli: cli.trainer.max_epochs == 3),
    "trainer.min_epochs": ("1", lambda cli: cli.trainer.min_epochs == 1),
    "trainer.max_steps": ("9", lambda cli: cli.trainer.max_steps == 9),
    "trainer.min_steps": ("2", lambda cli: cli.trainer.min_steps == 2),
    "trainer.max_time": ("00:01:00:00", lambda cli: cli.config_init.fit.preemption.max_time == "00:01:00:00"),
    "trainer.limit_train_batches": ("0.5", lambda cli: cli.trainer.limit_train_batches == 0.5),
    "trainer.limit_val_batches": ("2", lambda cli: cli.trainer.limit_val_batches == 2),
    "trainer.limit_test_batches": ("3", lambda cli: cli.trainer.limit_test_batches == 3),
    "trainer.limit_predict_batches": ("4", lambda cli: cli.trainer.limit_predict_batches == 4),
    "trainer.val_check_interval": ("4", lambda cli: cli.trainer.val_check_interval == 4),
    "trainer.check_val_every_n_epoch": ("1", lambda cli: cli.trainer.check_val_every_n_epoch == 1),
    "trainer.num_sanity_val_steps": ("2", lambda cli: cli.trainer.num_sanity_val_steps == 2),
    "trainer.log_every_n_steps": ("3", lambda cli: cli.trainer.log_every_n_steps == 3),
    "trainer.enable_checkpointing": ("false", lambda cli: not has(cli.trainer.callbacks, "LastCheckpoint")),
    "trainer.enable_progress_bar": ("true", lambda cli: has(cli.trainer.callbacks, "ProgressBar")),
    "trainer.enable_model_summary": ("true", lambda cli: has(cli.trainer.callbacks, "ModelSummary")),
    "trainer.gradient_clip_val": ("0.5", lambda cli: cli.trainer.gradient_clip_val == 0.5),
    "trainer.gradient_clip_algorithm": ("value", lambda cli: cli.trainer.gradient_clip_algorithm == "value"),
    "trainer.deterministic": ("warn", lambda cli: torch.is_deterministic_algorithms_warn_only_enabled()),
    "trainer.benchmark": ("true", lambda cli: torch.backends.cudnn.benchmark),
    "trainer.inference_mode": ("false", lambda cli: not cli.trainer.validate_loop.inference_mode),
    "trainer.profiler": ("simple", lambda cli: has([cli.trainer.profiler], "SimpleProfiler")),
    "trainer.detect_anomaly": ("true", lambda cli: cli.trainer._detect_anomaly),
    "trainer.plugins": ("[Plugin]", lambda cli: has([cli.trainer.strategy.cluster_environment], "Plugin")),
    "trainer.sync_batchnorm": ("true", lambda cli: cli.trainer.strategy._layer_sync is not None),
    "trainer.reload_dataloaders_every_n_epochs": ("1", lambda cli: cli.trainer.reload_dataloaders_every_n_epochs == 1),
    "trainer.default_root_dir": ("/x", lambda cli: cli.trainer.default_root_dir == "/x"),
    "trainer.enable_autolog_hparams": ("false", lambda cli: not cli.trainer.enable_autolog_hparams),
}
ELSEWHERE = {"config", "ckpt_path", "trainer.fast_dev_run"}  # test_cli.py, test_runs.py, below
REFUSED = {
    "trainer.overfit_batches=4": "data.repeat_first_batch true",
    "trainer.barebones=true": "remove the key",
    "trainer.accumulate_grad_batches=2": "it is derived: edit data.global_batch_size",
    "trainer.use_distributed_sampler=true": "remove the key",
    "trainer.model_registry=mine": "--ckpt_path a folder",
    "trainer.strategy=FSDPStrategy": "strategy/fsdp2",
    "trainer.strategy=DeepSpeedStrategy": "strategy/zero2",
    "trainer.strategy=deepspeed_stage_2": "strategy/zero2",
    "trainer.callbacks={class_path: StochasticWeightAveraging, init_args: {swa_lrs: 0.1}}": "EMAWeightAveraging",
    "trainer.callbacks=[LearningRateFinder]": "model.optim.learning_rate",
    "trainer.callbacks+=BatchSizeFinder": "the verb `compare`",
    "trainer.callbacks=EarlyStoping": "no class EarlyStoping; did you mean EarlyStopping",
    "trainer.num_nodes=two": "trainer.num_nodes",
    "optimizer=torch.optim.Muon": "--optimizer Muon: it updates matrices alone",
    "optimizer=LBFGS": "--optimizer LBFGS: .*parameter groups",
    "optimizer=SparseAdam": "--optimizer SparseAdam: .*dense",
    "lr_scheduler={class_path: OneCycleLR, init_args: {max_lr: 1}}": "--lr_scheduler OneCycleLR: .*total_steps",
}


class Plugin(LightningEnvironment):
    """A cluster environment of a user's."""


def has(objects: list[Any], name: str) -> bool:
    return any(name in kind.__name__ for one in objects for kind in type(one).__mro__)


def test_every_option_is_in_one_of_the_tables(trainer_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new version of Lightning may have new ones."""
    parsers = []
    parse = CLI.parse_arguments
    monkeypatch.setattr(
        CLI,
        "parse_arguments",
        lambda self, *args: (parsers.append(self._subcommand_parsers["fit"]), parse(self, *args)),
    )
    trainer_of()
    keys = {action.dest for action in parsers[0]._actions if not action.dest.endswith("help")}
    ours = {"model", "data", "run", "cluster", "trainer", "print_config", *always_on()}
    lightnings = {key for key in keys if key.split(".")[0] not in ours or key.startswith("trainer.")}
    refused = {re.split("[=+]", flag)[0] for flag in REFUSED}
    assert lightnings == {*HONOURED, *ELSEWHERE, *refused}


def test_every_option_that_is_not_refused_is_honoured(trainer_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {key: value.replace("Plugin", f"{__name__}.Plugin") for key, (value, _) in HONOURED.items()}
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    try:
        cli = trainer_of(*(f"--{key}={value}" for key, value in values.items()))
        assert not isinstance(cli, str), cli
        assert not [key for key, (_, is_honoured) in HONOURED.items() if not is_honoured(cli)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert trainer_of("--trainer.fast_dev_run=2").trainer.fast_dev_run == 2


@pytest.mark.parametrize("flag", REFUSED)
def test_an_option_that_cannot_be_honoured_is_refused_with_what_to_use(flag: str, trainer_of: Any) -> None:
    sentence = trainer_of(f"--{flag}")
    assert isinstance(sentence, str), "it is taken"
    assert re.search(REFUSED[flag], sentence), sentence
    assert "object at 0x" not in sentence


def test_the_end_of_fit_names_only_what_there_is(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("lightning.pytorch").addHandler(caplog.handler)
    off = ["--trainer.enable_checkpointing=false", "--trainer.logger=false", "--trainer.profiler=simple"]
    assert run("fit", *flags, "--trainer.max_steps=2", *off) == 0
    assert not (only_run(tmp_path) / "checkpoints").exists()
    logging.getLogger("lightning.pytorch").removeHandler(caplog.handler)
    shown = capfd.readouterr().out
    assert not any(word in shown for word in ("--ckpt_path last", "tensorboard", "continue training"))
    assert "Profiler Report" in caplog.text


@pytest.mark.parametrize("name", ["torch.optim.SGD", "torch.optim.Adafactor", "NAdam", "Rprop"])
def test_an_optimizer_by_name_is_built_over_the_parameter_groups(name: str, trainer_of: Any) -> None:
    cli = trainer_of(f"--optimizer={name}", "--model.optim.learning_rate=0.5")
    built = built_optimizer(cli)
    assert type(built).__name__ == name.rpartition(".")[2]
    assert {group["lr"] for group in built.param_groups} == {0.5}
    decay = [group.get("weight_decay") for group in built.param_groups]
    assert decay == ([None, None] if name == "Rprop" else [0.1, 0.0]), "no decay on vectors"


def test_an_optimizers_own_arguments_go_before_model_optims(trainer_of: Any) -> None:
    own = {"lr": 0.001, "weight_decay": 0, "momentum": 0.9}  # lr is SGD's default: it is given all the same
    cli = trainer_of("--optimizer=torch.optim.SGD", *(f"--optimizer.{name}={value}" for name, value in own.items()))
    settings = [(g["lr"], g["weight_decay"], g["momentum"]) for g in built_optimizer(cli).param_groups]
    assert settings == [(0.001, 0.0, 0.9)] * 2


def built_optimizer(cli: Any) -> Any:
    return optim.build_optimizer(torch.nn.Linear(2, 2), cli.model.optim)


def test_a_run_trains_by_the_optimizer_and_the_schedule_that_are_named(flags: list[str], tmp_path: Path) -> None:
    chosen = ["--optimizer=torch.optim.SGD", "--optimizer.momentum=0.9", "--lr_scheduler=StepLR"]
    chosen += ["--lr_scheduler.step_size=1", "--lr_scheduler.gamma=0.5", "--model.optim.learning_rate=0.5"]
    assert run("fit", *flags, *chosen, "--trainer.max_steps=3") == 0
    rates = list(logged(only_run(tmp_path), "train/learning_rate").values())
    assert rates == [0.25, 0.125, 0.0625], "stepped after each optimizer step"
    settings = f"--config={only_run(tmp_path)}/config.yaml"
    assert run("fit", settings, "--trainer.max_steps=4", "--ckpt_path=last") == 0, "what was recorded runs again"
    assert logged(only_run(tmp_path), "train/learning_rate")[4] == 0.03125


def test_a_scheduler_alone_steps_adamw(trainer_of: Any) -> None:
    cli = trainer_of("--lr_scheduler=ReduceLROnPlateau", "--lr_scheduler.monitor=eval/token_accuracy")
    entry = optim.build_schedule(built_optimizer(cli), cli.model.optim, 20, 4)
    assert isinstance(entry["scheduler"].optimizer, torch.optim.AdamW)
    assert entry["monitor"] == "eval/token_accuracy" and entry["frequency"] == 4
