"""`fit`, `validate`, `test`, `predict`: from --config files and flags to a Trainer that runs.

LightningCLI does the work. It calls the methods of `CLI` in this order:

    add_arguments_to_parser         keys of the run folder, callbacks of every run, optimizer
    parse_arguments                 one configuration from all files and flags
    before_instantiate_classes      the run's folder and the checkpoint to load
    instantiate_classes             model, data, strategy, callbacks
    instantiate_trainer             checks what cannot work together, then the Trainer (trainer.py)
    before_fit, after_fit, …        around Lightning's fit, validate, test or predict"""

from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from .. import hooks
from ..by_tokens import AUTO
from ..callbacks.record import Record
from ..cluster.run_lock import RUN_LOCK
from ..cluster.site import Site
from ..cluster.watchdog import WATCHDOG
from ..compat.lightning import before_setup, exit_with_codes, explain_optimizers
from ..compat.lightning_cli import OpenCLI, keys_of
from ..errors import InputError, reason
from ..layout import refuse_lazy
from ..model import any_module
from ..model.optim import OptimConfig
from ..observe.history.run import PLACEHOLDER, replaced
from ..parallel.rank_view import is_strategy
from ..plugins import STRATEGIES, PluginError, loaded, loaded_parts, note
from ..project import Project
from . import limits, ranges, strategy_names
from .chosen import Choice
from .defaults import always_on, differing, hide_expected, trainer_defaults
from .parser import (
    OPTIMIZATION,
    ConfigFile,
    Parser,
    Refused,
    add_callback,
    add_optimization,
    as_launched,
    inherit_rates,
    missing_requirement,
    refuse_misread,
    typed_keys,
)
from .run import (
    check_checkpoint,
    check_writable,
    choose_run,
    run_of,
    run_section,
    write_predictions,
)
from .trainer import as_list, complete

__all__ = ["CLI", "WithoutTrainer"]


def is_logger(value: object) -> bool:
    """a subclass of Lightning's Logger"""
    return isinstance(value, type) and issubclass(value, Logger)


# Imported, so that `class_path` knows them by their names.
loaded_parts(STRATEGIES, "strategy_class", is_strategy)
loaded("dist_template.loggers", is_logger)
hide_expected()


def main(argv: list[str], project: Project) -> None:
    """Runs one of Lightning's verbs. Raises InputError if the configuration cannot be run."""
    try:
        with RUN_LOCK:
            try:
                CLI(project, argv, run=True)
            except InputError:
                RUN_LOCK.discard()
                raise
    except MisconfigurationException as error:  # the later sentences name the key
        raise InputError(f"trainer: {str(error).replace('. ', '; ')}") from error


class CLI(OpenCLI):
    """LightningCLI with this library's defaults, callbacks and checks."""

    run: Path
    unfilled: Any  # the configuration with "{run}" in it

    def __init__(
        self, project: Project, args: list[str], run: bool, verb: str | None = None
    ) -> None:
        exit_with_codes()
        self._package = project.folder
        self._verb = args[0] if run else None
        self._name = self._verb or verb
        self._section = ""  # of `fit --help SECTION`
        for flag, word in pairwise(args):
            if flag in ("-h", "--help") and not word.startswith("-") and not self._section:
                self._section = word
        module = project.class_of(project.module)
        self._trainer_defaults = trainer_defaults(module)
        super().__init__(
            module,
            project.class_of(project.data),
            save_config_callback=None,  # callbacks/record.py writes it, into the run's folder
            trainer_defaults=self._trainer_defaults,
            seed_everything_default=0,
            args=args,
            run=run,
            auto_configure_optimizers=False,  # the optimizer is built when there are parameters
        )

    # ---- the configuration -------------------------------------------------------------------

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        strategy_names.TAKEN.clear()
        # allow_abbrev would accept the beginning of a key.
        parser = Parser(verb=self._name, **kwargs, allow_abbrev=False)
        parser.section = self._section
        text = (
            "A YAML file of these keys, or a name of `config list`; give several, the later one"
            " wins."
        )
        parser.add_argument("-c", "--config", action=ConfigFile, help=text)
        return parser

    def subcommands(self) -> dict[str, set[str]]:
        """Returns only the given verb: the parsers of all four take four times as long."""
        every = super().subcommands()
        return {verb: every[verb] for verb in every if verb == self._verb}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        self._sections: dict[str, type] = {"trainer": L.Trainer, "cluster": Site}
        self._sections["run"] = run_section()
        for key in ("run", "cluster"):
            parser.add_class_arguments(self._sections[key], key)
        for key, plugin in always_on().items():
            try:
                self._sections[key] = add_callback(parser, key, plugin)
            except PluginError as error:
                note(f"{error}; the run has no {key}")
        add_optimization(parser)
        if self._name != "fit":
            assert isinstance(parser, Parser)
            shown = {"help", "config", "print_config"}
            parser.keys_of_fit = {action.dest for action in keys_of(parser)} - shown

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses without Lightning's warning about sys.argv."""
        config = self.config = parser.parse_args(args)
        if self._verb:
            config = config[self._verb]
        self._typed = typed_keys(args)
        strategy_names.check(config.trainer.get("strategy"))
        refuse_misread(args, config)
        self._check_ranges(config)
        if config.get("optimizer"):
            given = parser.parse_args(args, defaults=False)  # without the default learning rate
            inherit_rates(config, given[self._verb] if self._verb else given)

    def before_instantiate_classes(self) -> None:
        verb = self.subcommand
        self.unfilled = settings = self.config[verb] if verb else self.config
        as_launched(settings)
        strategy_names.print_lines()
        run_of(settings).check(writes=verb is not None)
        hooks.start(settings, verb if self.executes else None, self._check_configuration)
        self.run, checkpoint, message = choose_run(settings, verb)
        if message:
            rank_zero_only(print)(message)
        if checkpoint:
            settings.ckpt_path = checkpoint
            check_checkpoint(Path(checkpoint))
            if settings.weights_only is None:
                settings.weights_only = True  # a checkpoint must not execute code
        filled = replaced(settings, PLACEHOLDER, str(self.run))
        if verb == "fit":
            for key in ("last_checkpoint", "best_checkpoint"):  # not hours later at the first save
                check_writable(f"{key}.dirpath", settings[key].dirpath, Path(filled[key].dirpath))
        if verb:
            self.config[verb] = filled
        else:
            self.config = filled

    def _check_configuration(self) -> None:
        """Raises if the configuration has values of other types than its keys."""
        self.parser.validate(self.config)
        self._check_ranges(self.unfilled)

    def _check_ranges(self, settings: Any) -> None:
        classes: dict[str, Any] = {"model": self.model_class, "data": self.datamodule_class}
        ranges.check(settings, self._sections | classes)

    # ---- the objects -------------------------------------------------------------------------

    def instantiate_classes(self) -> None:
        """Reports the reason alone if a class refuses its arguments."""
        refused = Refused()
        self.parser.add_instantiator(refused.construct, object, subclasses=True)
        try:
            super().instantiate_classes()
        except InputError:
            raise
        except Exception as error:  # jsonargparse lists the reason among other failed attempts
            lacking = missing_requirement(str(error))
            if lacking and isinstance(error, ValueError):
                raise InputError(lacking) from error
            if refused.why:
                raise InputError(refused.why) from error
            raise

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        self._pass_optimization()
        self._accumulate()
        self._check_limits()
        if not self.model.automatic_optimization:
            kwargs |= self._settings_of_manual_optimization()
        callbacks = as_list(self._trainer_arguments.get("callbacks"))
        if any(isinstance(callback, ProgressBar) for callback in callbacks):
            kwargs["enable_progress_bar"] = True  # Lightning refuses the bar with our default
        try:
            # Without checkpointing, Lightning refuses callbacks that save; trainer.py removes them.
            # Samples are distributed by the data module, or else by SampleOrder.
            options = {**kwargs, "enable_checkpointing": True, "use_distributed_sampler": False}
            if self._trainer_arguments.get("default_root_dir") is None:
                # of `logger: true`, and of callbacks and profilers without a folder of their own
                options["default_root_dir"] = str(self.run)
            trainer: Any = super().instantiate_trainer(**options)
        except (MisconfigurationException, ModuleNotFoundError, RuntimeError, ValueError) as error:
            raise InputError(f"trainer: {reason(error)}; edit its keys") from error
        self.summary = complete(
            trainer,
            self.datamodule,
            self.run,
            given=self._trainer_arguments,
            config=self.resolved_config(),
            defaults=self._defaults,
            is_manual=not self.model.automatic_optimization,
            plateau=self._monitor_of_plateau(),
        )
        explain_optimizers(trainer.strategy, self.model)
        before_setup(trainer.strategy, lambda: refuse_lazy(self.model))
        return trainer

    def _settings_of_manual_optimization(self) -> dict[str, None]:
        """Returns the Trainer's settings without a default for clipping. Raises InputError for
        settings of what the module must do itself."""
        name, key = type(self.model).__name__, "gradient_clip_val"
        given = self._trainer_arguments if self.subcommand == "fit" else {}
        if given.get(key) not in (None, self._trainer_defaults.get(key)):
            raise InputError(
                f"trainer.{key} is {given[key]}, and {name} optimizes manually: call"
                f" self.clip_gradients(optimizer, {given[key]}) in its training_step, and remove"
                " the key"
            )
        batches = given.get("accumulate_grad_batches")
        if batches is not None and batches > 1:
            raise InputError(
                f"trainer.accumulate_grad_batches is {batches}, and {name} optimizes manually: step"
                " every so many batches in its training_step, and remove the key"
            )
        return {key: None}

    def _pass_optimization(self) -> None:
        """Passes --optimizer and --lr_scheduler to optim.py, which builds them."""
        for key in OPTIMIZATION:
            chosen = self.value(self.config, key)
            if not chosen:
                continue
            if not any_module.typed_attribute(self.model, "optim", OptimConfig):
                name = type(self.model).__name__
                raise InputError(f"--{key}: {name} has no `optim`; edit its configure_optimizers")
            why = limits.unread.class_without_effect(self.model, key)
            if why:
                raise InputError(why)
            setattr(self.model.optim, f"{key}_class", chosen.as_dict())

    def _monitor_of_plateau(self) -> str:
        """Returns where the monitor of ReduceLROnPlateau is set."""
        if self.value(self.config, "lr_scheduler"):
            return "--lr_scheduler.monitor"
        return f"the monitor in {type(self.model).__name__}.configure_optimizers"

    def _accumulate(self) -> None:
        """Lets trainer.accumulate_grad_batches set data.global_batch_size, as a user of Lightning
        expects: micro-batch x data-parallel ranks x that number, also in config.yaml. In place of
        auto, which chosen.py replaces when the rows are known, it sets the least possible."""
        given = self._machine, self._trainer_arguments, self.model, self.datamodule
        size = limits.accumulated_batch(*given) if self.subcommand == "fit" else None
        before = getattr(self.datamodule, "global_batch_size", None)
        if size is None and before == AUTO:
            self.datamodule.global_batch_size = limits.least_batch(*given)
        if size is None or size == before:
            return
        batches = self._trainer_arguments["accumulate_grad_batches"]
        rank_zero_only(print)(
            f"trainer.accumulate_grad_batches {batches}: data.global_batch_size is {size}"
            f" (before: {before})"
        )
        self.datamodule.global_batch_size = size
        self.resolved_config()["data"]["global_batch_size"] = size

    def _check_limits(self, *model_config: Any) -> None:
        """Refuses what cannot work; called again when the model's configuration is known."""
        violations = limits.violations(
            self._machine,
            self._trainer_arguments,
            self.model,
            self.datamodule,
            *model_config,
            trains=self.subcommand == "fit",
            saves_asynchronously=self.value(self.config_init, "last_checkpoint").asynchronous,
            typed=self._typed,
        )
        if violations:
            raise InputError(violations[0])

    @cached_property
    def _machine(self) -> limits.Machine:
        return limits.Machine.of(self._trainer_arguments)

    @property
    def _trainer_arguments(self) -> dict[str, Any]:
        return {**self.value(self.config_init, "trainer", default={})}

    def _defaults(self) -> str:
        """Returns the content of config.yaml with all keys at their defaults."""
        parser = self.parser_of(self.subcommand)
        return parser.dump(parser.get_defaults(), skip_unset=False, skip_link_targets=False)

    # ---- around a verb, in the first process, before any other process starts ----------------

    def before_fit(self) -> None:
        """Tokenizes unless a launcher has started other processes, and checks the model. Then the
        values that depend on the data are chosen, and the run's folder is locked."""
        environment = getattr(self.trainer.strategy, "cluster_environment", None)
        is_launched = environment is not None and environment.creates_processes_externally
        is_fit = self.subcommand == "fit"
        resumes = self.config[self.subcommand].ckpt_path if is_fit else None
        if hasattr(self.datamodule, "prepare"):  # otherwise Lightning calls its prepare_data
            if is_launched or resumes or self.datamodule.is_prepared:
                self.datamodule.require()  # a stale cache is refused, not replaced
            else:
                self.datamodule.prepare(report=WATCHDOG.report)
        config = any_module.build_config(self.model, self.datamodule)
        self._check_limits(config)
        if not is_fit:
            return
        self._choose_values(config, resumes)
        if resumes:
            last = self.value(self.config_init, "last_checkpoint")
            last.compare(Path(resumes), self.trainer, self.datamodule, self.model)
        self._print_notes(config)
        same = self.value(self.config_init, "same_environment")
        same.lock(self.trainer, self.run, is_launched)

    def _choose_values(self, config: Any, resumes: str | None) -> None:
        """Replaces `auto` by values that depend on the data, and prints them."""
        ranks = limits.data_parallel(self._machine, self._trainer_arguments)
        callbacks = any_module.callbacks_of(self.trainer)
        (record,) = (each for each in callbacks if isinstance(each, Record))
        given = self.trainer, self.model, self.datamodule, config, resumes, ranks
        for line in Choice(record.config, *given).lines():
            rank_zero_only(print)(line)

    def _print_notes(self, config: Any) -> None:
        """Prints what is not Lightning's default, not proven, or has no effect on this model."""
        lines: list[str] = []
        if not getattr(self.model, "counts_tokens", False):
            lines.append(differing(self._trainer_arguments))
        where = self.trainer.strategy, self.trainer.world_size, self._package
        lines += limits.proven.notes(config, self.model, self.datamodule, *where)
        given = self._machine, self._trainer_arguments, self.model, self.datamodule, config
        lines += limits.notes(*given, typed=self._typed)
        for line in filter(None, lines):
            rank_zero_only(print)(line)

    before_validate = before_test = before_fit

    def before_predict(self) -> None:
        """Refuses an empty list of prompts."""
        if not getattr(self.datamodule, "prompts", True):
            raise InputError("data.prompts is []: give texts to continue, such as ['def']")
        self.before_fit()

    def after_fit(self) -> None:
        """Validates the last step, then prints the summary."""
        has_validation = any_module.has_validation(self.model, self.datamodule)
        is_validated = self.summary.validated_step == self.trainer.global_step
        if has_validation and self.trainer.limit_val_batches and not is_validated:
            self.trainer.validate(self.model, self.datamodule, verbose=False)
        self.summary.show(self.trainer, self.model)

    @rank_zero_only
    def after_predict(self) -> None:
        write_predictions(self.trainer.predict_loop.predictions, self.run / "predictions.jsonl")


class WithoutTrainer(CLI):
    """A verb that does not run, or a tool's: its keys, model, data and run folder."""

    executes = False

    @classmethod
    def of(cls, argv: list[str], project: Project, run: bool = False) -> Self:
        """Returns the objects that `argv` describes, a verb and keys of fit; of one of Lightning's
        verbs with `run`. Raises InputError if a file cannot be read, or a section or a value is
        wrong."""
        return cls(project, argv if run else argv[1:], run, verb=argv[0])

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        self._pass_optimization()
        return None  # ty: ignore[invalid-explicit-return]
