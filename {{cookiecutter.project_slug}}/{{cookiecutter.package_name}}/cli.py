"""`fit`, `validate`, `test`, `predict`: from --config files and flags to a Trainer that runs.

LightningCLI does the work. Here stand: which callbacks always run, where a run keeps its things, the checks that
must pass before any process starts, and how a mistake is told.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from .callbacks.checkpoint import BestCheckpoint, LastCheckpoint
from .callbacks.console import Console
from .callbacks.crash import Crash
from .callbacks.diagnosis import Diagnosis
from .callbacks.experts import Experts
from .callbacks.facts import Facts
from .callbacks.garbage import Garbage
from .callbacks.goodput import Goodput
from .callbacks.hardware import Hardware
from .callbacks.inputs import Inputs
from .callbacks.ledger import SampleLedger
from .callbacks.messages import WarningsOfRanks
from .callbacks.numerics import Numerics
from .callbacks.preemption import Preemption
from .callbacks.random_state import RandomState
from .callbacks.record import Record
from .callbacks.samples import Samples
from .callbacks.summary import Summary
from .callbacks.throughput import Throughput
from .callbacks.training_log import TrainingLog
from .callbacks.watchdog import Watchdog
from .checkpoint.optimizer import ParameterNames
from .checkpoint.resume import EveryFormat
from .cluster import children  # noqa: F401  (how Lightning's own launcher ends)
from .cluster.fingerprint import SameEnvironment
from .cluster.messages import MESSAGES
from .cluster.watch import WATCH
from .data import DataModule
from .errors import InputError, reason
from .loggers.run_log import RunLog
from .loggers.tensorboard import TensorBoard  # noqa: F401  (makes `class_path: TensorBoard` known)
from .loggers.wandb import WandB  # noqa: F401
from .loop import lighten
from .module import LanguageModule
from .parallel import (
    ddp,  # noqa: F401  (gives "ddp" its defaults)
    limits,
)
from .parallel.half import HalfParameters
from .parallel.mesh import MeshStrategy  # noqa: F401  (makes `class_path: MeshStrategy` known)
from .parallel.zero import ZeroStrategy  # noqa: F401
from .parser import ConfigFile, Parser, as_launched
from .run import RunConfig, check_checkpoint, fill_placeholders, goes_on, new_run, newest_run

# In the order in which they are called: measure, write, show, act.
ALWAYS_ON = {
    "watchdog": Watchdog,
    "same_environment": SameEnvironment,
    "random_state": RandomState,
    "parameter_names": ParameterNames,
    "numerics": Numerics,
    "sample_ledger": SampleLedger,
    "throughput": Throughput,
    "hardware": Hardware,
    "inputs": Inputs,
    "experts": Experts,
    "messages": WarningsOfRanks,
    "training_log": TrainingLog,
    "console": Console,
    "diagnosis": Diagnosis,
    "samples": Samples,
    "last_checkpoint": LastCheckpoint,
    "best_checkpoint": BestCheckpoint,
    "goodput": Goodput,
    "preemption": Preemption,
}

TRAINER_DEFAULTS = {
    "use_distributed_sampler": False,  # data.py owns the order of samples
    "num_sanity_val_steps": -1,  # a whole validation before training: where did it begin?
    "check_val_every_n_epoch": None,  # val_check_interval counts across epochs
    "val_check_interval": 100,
    "log_every_n_steps": 10,
    "gradient_clip_val": 1.0,
    "enable_progress_bar": False,  # callbacks/console.py shows progress without a device sync
    "enable_model_summary": False,
    "logger": [{"class_path": "TensorBoard", "init_args": {"save_dir": "{run}"}}],
}


# What Lightning says at every start about itself; its warnings stay.
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)  # torch 2.13 with lightning 2.6
for expected in (
    ".*sync_dist=True.*",  # module.py has reduced them already
    ".*your dataloader is not resumable.*",  # data.py's is, by samples consumed
    ".*smaller than the logging interval.*",  # callbacks/training_log.py counts optimizer steps across epochs
    ".*exists and is not empty.*",  # a resumed run goes on in its folder
):
    warnings.filterwarnings("ignore", message=expected)


def main(argv: list[str]) -> None:
    """Run one of Lightning's verbs.

    Raises:
        InputError: what was given cannot be run.
    """
    CLI(args=argv, run=True)


def parse(argv: list[str]) -> CLI:
    """The objects that `argv` describes, without a Trainer; `argv[0]`, the tool's verb, is passed over."""
    return WithoutTrainer(args=argv[1:], run=False)


class CLI(LightningCLI):
    """LightningCLI with our classes, defaults and checks."""

    run: Path
    dirpath: str  # of checkpoints, with "{run}" in it

    def __init__(self, args: list[str], run: bool) -> None:
        MESSAGES.listen()
        self._verb = args[0] if run else None
        super().__init__(
            LanguageModule,
            DataModule,
            save_config_callback=None,  # callbacks/record.py writes it, into the run's own folder
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=0,
            args=args,
            run=run,
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = Parser(**kwargs, allow_abbrev=False)  # a misspelt key is a mistake, also where it is a key's beginning
        parser.add_argument(
            "-c", "--config", action=ConfigFile, help="A YAML file of these keys; give several, the later one wins."
        )
        return parser

    def subcommands(self) -> dict[str, set[str]]:
        """Only the verb that is wanted: to build the parsers of all four takes four times as long."""
        return {verb: skipped for verb, skipped in super().subcommands().items() if verb == self._verb}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(RunConfig, "run")
        for key, callback in ALWAYS_ON.items():
            parser.add_lightning_class_args(callback, key)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)  # without Lightning's warning that sys.argv is there too

    def _parse_ckpt_path(self) -> None:
        """Lightning would let the checkpoint's hyperparameters override the configuration: here the YAML rules."""

    def before_instantiate_classes(self) -> None:
        settings = self.config[self.subcommand] if self.subcommand else self.config
        as_launched(settings)
        run_config = RunConfig(**vars(settings.run))
        self.dirpath = dirpath = settings.last_checkpoint.dirpath
        self.run = newest_run(run_config, dirpath) if settings.get("ckpt_path") == "last" else new_run(run_config)
        own = Path(fill_placeholders(dirpath, self.run))
        if settings.get("ckpt_path") == "last":
            settings.ckpt_path = str(own)
        elif self.subcommand == "fit" and goes_on(own):
            self._tell_that_it_goes_on(settings.ckpt_path)
            settings.ckpt_path = str(own)
        if settings.get("ckpt_path"):
            check_checkpoint(Path(settings.ckpt_path))
            if settings.weights_only is None:
                settings.weights_only = True  # a checkpoint is data: nothing in it may run
        filled = fill_placeholders(settings, self.run)
        if self.subcommand:
            self.config[self.subcommand] = filled
        else:
            self.config = filled

    @rank_zero_only
    def _tell_that_it_goes_on(self, instead_of: str | None) -> None:
        """The first process's; a relaunch resumes by itself, and someone may not have meant a relaunch."""
        first = f", not from {instead_of}, where it began" if instead_of else ""
        print(f"{self.run} has checkpoints: the run goes on from its newest{first} (another run.name begins anew)")

    def instantiate_classes(self) -> None:
        """Where a strategy refuses its arguments, its reason alone: jsonargparse tells it as one of several."""
        try:
            super().instantiate_classes()
        except InputError:
            raise
        except ValueError as error:
            reasons = re.findall(r"^  - (.+)", str(error), re.MULTILINE)
            if "Union subtypes" not in str(error) or not reasons:
                raise
            raise InputError(reasons[-1]) from error

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        self._refuse_the_impossible()
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError) as error:
            raise InputError(f"trainer: {reason(error)}; edit its keys") from error
        if trainer.num_devices > 1:
            _set_num_threads_if_needed(trainer.num_devices)  # by Lightning in rank 0 alone, for some of the strategies
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = EveryFormat()
        if type(trainer.strategy.precision_plugin) is HalfPrecision:
            trainer.strategy.precision_plugin = HalfParameters(trainer.strategy.precision_plugin.precision)
        if not trainer.fast_dev_run:  # ty: ignore[missing-attribute]
            trainer.loggers = [*trainer.loggers, RunLog(self.run)]
        reports = self._get(self.config_init, "run").report and not trainer.fast_dev_run  # ty: ignore[missing-attribute]
        self.summary = Summary(self.run, reports)
        self._dump_config()
        plain = json.loads(json.dumps(self.config_dump, default=str))
        facts, record = Facts(self.run), Record(self.run, plain, self._defaults)
        trainer.callbacks += [facts, record, Garbage(), self.summary]  # ty: ignore[missing-attribute]
        trainer.callbacks.insert(0, Crash(self.run))  # ty: ignore[missing-attribute]
        lighten(trainer)
        watchdog, same = (self._get(self.config_init, key) for key in ("watchdog", "same_environment"))
        watchdog.begin(trainer, self.run)
        same.begin(trainer, self.run, plain, watchdog.start_timeout_s)
        return trainer

    def _defaults(self) -> str:
        """As config.yaml would be if nobody had set a key."""
        parser = self._parser(self.subcommand)
        return parser.dump(parser.get_defaults(), skip_unset=False, skip_link_targets=False)

    def _refuse_the_impossible(self, *model_config: Any) -> None:
        """Twice: before there is a Trainer, and again when the data have told the model's configuration."""
        arguments = {**self._get(self.config_init, "trainer", default={})}
        options = {
            "trains": self.subcommand == "fit",
            "saves_asynchronously": self._get(self.config_init, "last_checkpoint").asynchronous,
        }
        for sentence in limits.violations(
            self._machine, arguments, self.model, self.datamodule, *model_config, **options
        ):
            raise InputError(sentence)

    @cached_property
    def _machine(self) -> limits.Machine:
        return limits.Machine.of(self._get(self.config_init, "trainer", default={}))

    # ---- before each verb, in the first process, when nothing has been started yet -----------------------------

    def before_fit(self) -> None:
        """Refuse what cannot work, and tokenize when this process is the only one so far."""
        environment = getattr(self.trainer.strategy, "cluster_environment", None)
        started_by_a_launcher = environment is not None and environment.creates_processes_externally
        resumes = self.subcommand == "fit" and self.config[self.subcommand].ckpt_path
        if started_by_a_launcher or resumes or self.datamodule.is_prepared:  # a stale cache is refused, not replaced
            self.datamodule.require()
        else:
            self.datamodule.prepare(report=WATCH.say)
        self._refuse_the_impossible(self.model.build_config(self.datamodule))

    before_validate = before_test = before_predict = before_fit

    def after_fit(self) -> None:
        """End on a validation of the last step, then say where everything is."""
        validates = self.datamodule.validation_share and self.trainer.limit_val_batches
        if validates and self.summary.validated_step != self.trainer.global_step:
            self.trainer.validate(self.model, self.datamodule, verbose=False)
        self.summary.show(self.trainer, self.model)

    @rank_zero_only
    def after_predict(self) -> None:
        path = self.run / "predictions.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        predictions: list[Any] = self.trainer.predict_loop.predictions
        path.write_text("".join(json.dumps(p, ensure_ascii=False) + "\n" for p in predictions), encoding="utf-8")
        for prediction in predictions:
            print(f"--- {prediction['prompt']}\n{prediction['prompt']}{prediction['continuation']}\n")
        print(f"written to {path}")


class WithoutTrainer(CLI):
    """For tools: the same keys, the model and the data, nothing that trains."""

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        return None  # ty: ignore[invalid-explicit-return]
