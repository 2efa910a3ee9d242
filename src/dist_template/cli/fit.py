"""`fit`, `validate`, `test`, `predict`: from --config files and flags to a Trainer that runs.

LightningCLI does the work. This file adds the callbacks of every run, its folder, and checks before any process starts.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ..callbacks.checkpoint import BestCheckpoint, LastCheckpoint
from ..callbacks.crash import Crash
from ..callbacks.garbage import Garbage
from ..callbacks.record import Record
from ..callbacks.sample_order import SampleOrder
from ..callbacks.summary import Summary
from ..checkpoint.resume import use_every_format
from ..cluster import subprocess_launcher
from ..cluster.messages import MESSAGES
from ..cluster.redaction import redacted
from ..cluster.run_lock import RUN_LOCK
from ..cluster.watchdog import WATCHDOG
from ..compat.lightning import limit_threads
from ..compat.lightning_cli import OpenCLI, keys_of
from ..compat.loop import lighten
from ..errors import InputError, reason
from ..model import any_module
from ..model.optim import OptimConfig
from ..observe.loggers.run_log import RunLog
from ..observe.loggers.tensorboard import TensorBoard  # noqa: F401  (makes `class_path: TensorBoard` known)
from ..observe.loggers.wandb import WandB  # noqa: F401
from ..parallel import ddp
from ..parallel.half import HalfParameters
from ..parallel.mesh import MeshStrategy  # noqa: F401  (makes `class_path: MeshStrategy` known)
from ..parallel.zero import ZeroStrategy  # noqa: F401
from ..project import Project
from . import config_file, limits
from .defaults import ALWAYS_ON, TRAINER_DEFAULTS, callback_class, hide_expected
from .parser import OPTIMIZATION, ConfigFile, Parser, add_optimization, as_launched, inherit_rates
from .run import (
    RunConfig,
    check_checkpoint,
    check_writable,
    fill_placeholders,
    goes_on,
    has_checkpoint,
    new_run,
    newest_checkpoint,
)

hide_expected()


def main(argv: list[str], project: Project) -> None:
    """Runs one of Lightning's verbs.

    Raises:
        InputError: the configuration cannot be run.
    """
    with RUN_LOCK:
        CLI(project, argv, run=True)


def parse(argv: list[str], project: Project) -> CLI:
    """Returns the objects that `argv` describes, without a Trainer; `argv[0]` is the tool's verb."""
    return WithoutTrainer(project, argv[1:], run=False, verb=argv[0])


class CLI(OpenCLI):
    """LightningCLI with this library's defaults, callbacks and checks."""

    run: Path
    unfilled: Any  # the configuration with "{run}" in it

    def __init__(self, project: Project, args: list[str], run: bool, verb: str | None = None) -> None:
        MESSAGES.listen()
        config_file.refuse_variables()
        subprocess_launcher.install()
        self._verb = args[0] if run else None
        self._name = self._verb or verb
        super().__init__(
            project.class_of(project.module),
            project.class_of(project.data),
            save_config_callback=None,  # callbacks/record.py writes it, into the run's own folder
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=0,
            args=args,
            run=run,
            auto_configure_optimizers=False,  # it would build the optimizer before there are parameters
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        # allow_abbrev would accept the beginning of a key.
        parser = Parser(verb=self._name, **kwargs, allow_abbrev=False)
        parser.add_argument(
            "-c", "--config", action=ConfigFile, help="A YAML file of these keys; give several, the later one wins."
        )
        return parser

    def subcommands(self) -> dict[str, set[str]]:
        """Returns only the given verb: building the parsers of all four takes four times as long."""
        return {verb: skipped for verb, skipped in super().subcommands().items() if verb == self._verb}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(RunConfig, "run")
        for key in ALWAYS_ON:
            parser.add_lightning_class_args(callback_class(key), key)
        add_optimization(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)  # without Lightning's warning about sys.argv
        if (self.config[self._verb] if self._verb else self.config).get("optimizer"):
            given = parser.parse_args(args, defaults=False)  # distinguishes a given learning rate from the default
            inherit_rates(*(c[self._verb] if self._verb else c for c in (self.config, given)))

    def before_instantiate_classes(self) -> None:
        self.unfilled = settings = self.config[self.subcommand] if self.subcommand else self.config
        as_launched(settings)
        RunConfig(**vars(settings.run)).check(writes=self.subcommand is not None)
        self._find_checkpoint(settings)
        if settings.get("ckpt_path"):
            check_checkpoint(Path(settings.ckpt_path))
            if settings.weights_only is None:
                settings.weights_only = True  # a checkpoint must not execute code
        filled = fill_placeholders(settings, self.run)
        if self.subcommand == "fit":
            for key in ("last_checkpoint", "best_checkpoint"):  # now, not hours later at the first save
                check_writable(f"{key}.dirpath", settings[key].dirpath, Path(filled[key].dirpath))
        if self.subcommand:
            self.config[self.subcommand] = filled
        else:
            self.config = filled

    def _find_checkpoint(self, settings: Any) -> None:
        """Sets `run` and `ckpt_path`; `last`, and an evaluation of a run's weights, use the existing run folder."""
        given, evaluates = settings.get("ckpt_path"), self.subcommand not in (None, "fit")
        if evaluates and not given and (not settings.model.get("pretrained") or has_checkpoint(settings)):
            given = "best or last"
        newest = None
        if given in ("last", "best", "best or last"):
            newest, checkpoint = newest_checkpoint(given, settings)
            settings.ckpt_path = str(checkpoint)
        self.run = newest if newest and (evaluates or given == "last") else new_run(RunConfig(**vars(settings.run)))
        folder = Path(fill_placeholders(settings.last_checkpoint.dirpath, self.run))
        if self.subcommand == "fit" and given != "last" and goes_on(folder):
            first = f", not from {settings.ckpt_path}, where it began" if given else ""
            self._say(
                f"{self.run} has checkpoints: the run goes on from its newest{first} (another run.name begins anew)"
            )
            settings.ckpt_path = str(folder)
        elif given in ("best", "best or last"):
            self._say(f"{self.subcommand}: the weights are those of {settings.ckpt_path}")
        elif evaluates and not given:
            self._say(
                f"{self.subcommand}: the weights are those of model.pretrained; there is no checkpoint of run.name"
            )

    @rank_zero_only
    def _say(self, sentence: str) -> None:
        print(sentence)

    def instantiate_classes(self) -> None:
        """Reports the reason alone if a strategy refuses its arguments; jsonargparse lists it among others."""
        try:
            super().instantiate_classes()
        except InputError:
            raise
        except ValueError as error:
            reasons = re.findall(r"^  - (?!Expected a <)(.+)", str(error), re.MULTILINE)
            if "Union subtypes" not in str(error) or not reasons:
                raise
            raise InputError(reasons[-1]) from error

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        self._choose_optimization()
        self._refuse_the_impossible()
        saves = self.value(self.config_init, "trainer", default={}).get("enable_checkpointing") is not False
        try:
            trainer = super().instantiate_trainer(**kwargs, enable_checkpointing=True)
        except (MisconfigurationException, ValueError) as error:
            raise InputError(f"trainer: {reason(error)}; edit its keys") from error
        if not saves:  # Lightning would refuse the callbacks that save, and asks none of them to stop
            savers = (LastCheckpoint, BestCheckpoint)
            trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, savers)]  # ty: ignore
        ddp.complete(self.value(self.config_init, "trainer", default={}).get("strategy"), trainer.strategy)
        if trainer.num_devices > 1:
            limit_threads(trainer.num_devices)  # by Lightning in rank 0 alone, for some of the strategies
        use_every_format(trainer, self.model)
        if type(trainer.strategy.precision_plugin) is HalfPrecision:
            trainer.strategy.precision_plugin = HalfParameters(trainer.strategy.precision_plugin.precision)
        if not trainer.fast_dev_run:  # ty: ignore[missing-attribute]
            trainer.loggers = [*trainer.loggers, RunLog(self.run)]
        reports = self.value(self.config_init, "run").report and not trainer.fast_dev_run  # ty: ignore[missing-attribute]
        self.summary = Summary(self.run, reports)
        plain = redacted(json.loads(json.dumps(self.resolved_config(), default=str)))
        record = Record(self.run, plain, self._defaults)
        trainer.callbacks += [record, Garbage(), self.summary]  # ty: ignore[missing-attribute]
        trainer.callbacks.insert(0, Crash(self.run))  # ty: ignore[missing-attribute]
        if not any_module.owns_order(self.datamodule):
            trainer.callbacks.insert(0, SampleOrder())  # ty: ignore[missing-attribute]
        lighten(trainer)
        watchdog, same = (self.value(self.config_init, key) for key in ("watchdog", "same_environment"))
        watchdog.begin(trainer, self.run)
        same.begin(trainer, self.run, plain, watchdog.start_timeout_s)
        return trainer

    def _choose_optimization(self) -> None:
        """Passes --optimizer and --lr_scheduler to optim.py, which builds them when the parameters exist."""
        for key in OPTIMIZATION:
            if not (chosen := self.value(self.config, key)):
                continue
            if not any_module.own(self.model, "optim", OptimConfig):
                raise InputError(f"--{key}: {type(self.model).__name__} has no `optim`; edit its configure_optimizers")
            setattr(self.model.optim, key, chosen.as_dict())

    def _defaults(self) -> str:
        """Returns the content of config.yaml with all keys at their defaults."""
        parser = self.parser_of(self.subcommand)
        return parser.dump(parser.get_defaults(), skip_unset=False, skip_link_targets=False)

    def _refuse_the_impossible(self, *model_config: Any) -> None:
        """Called before the Trainer is built, and again when the data determine the model's configuration."""
        arguments = {**self.value(self.config_init, "trainer", default={})}
        options = {
            "trains": self.subcommand == "fit",
            "saves_asynchronously": self.value(self.config_init, "last_checkpoint").asynchronous,
            "monitor": best.monitor if (best := self.value(self.config_init, "best_checkpoint")).keep else None,
        }
        for sentence in limits.violations(
            self._machine, arguments, self.model, self.datamodule, *model_config, **options
        ):
            raise InputError(sentence)

    @cached_property
    def _machine(self) -> limits.Machine:
        return limits.Machine.of(self.value(self.config_init, "trainer", default={}))

    # ---- before each verb, in the first process, when nothing has been started yet -----------------------------

    def before_fit(self) -> None:
        """Checks the configuration, and tokenizes if no launcher has started other processes."""
        environment = getattr(self.trainer.strategy, "cluster_environment", None)
        started_by_a_launcher = environment is not None and environment.creates_processes_externally
        resumes = self.subcommand == "fit" and self.config[self.subcommand].ckpt_path
        if not hasattr(self.datamodule, "prepare"):
            pass  # Lightning calls its prepare_data
        elif started_by_a_launcher or resumes or self.datamodule.is_prepared:  # a stale cache is refused, not replaced
            self.datamodule.require()
        else:
            self.datamodule.prepare(report=WATCHDOG.report)
        self._refuse_the_impossible(any_module.build_config(self.model, self.datamodule))
        if self.subcommand == "fit":
            self.value(self.config_init, "same_environment").lock(self.trainer, self.run, started_by_a_launcher)

    before_validate = before_test = before_fit

    def before_predict(self) -> None:
        """Refuses an empty list of prompts."""
        if not getattr(self.datamodule, "prompts", True):
            raise InputError("data.prompts is []: give what `predict` continues, such as ['def', 'import']")
        self.before_fit()

    def after_fit(self) -> None:
        """Validates the last step, then prints the summary."""
        validates = any_module.has_validation(self.model, self.datamodule) and self.trainer.limit_val_batches
        if validates and self.summary.validated_step != self.trainer.global_step:
            self.trainer.validate(self.model, self.datamodule, verbose=False)
        self.summary.show(self.trainer, self.model)

    @rank_zero_only
    def after_predict(self) -> None:
        path = self.run / "predictions.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        predictions: list[Any] = self.trainer.predict_loop.predictions
        lines = [json.dumps(p, ensure_ascii=False, default=_as_plain) + "\n" for p in predictions]
        path.write_text("".join(lines), encoding="utf-8")
        for prediction in predictions:
            if isinstance(prediction, dict) and {"prompt", "continuation"} <= prediction.keys():
                print(f"--- {prediction['prompt']}\n{prediction['prompt']}{prediction['continuation']}\n")
        print(f"written to {path}")


def _as_plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)  # a tensor or an array; anything else in words


class WithoutTrainer(CLI):
    """For tools: the same keys, model and data, without a Trainer."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        assert isinstance(parser, Parser)
        parser.keys_of_fit = {action.dest for action in keys_of(parser)} - {"help", "config"}

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        self._choose_optimization()
        return None  # ty: ignore[invalid-explicit-return]
