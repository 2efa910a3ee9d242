"""Every option of LightningCLI and of the Trainer is honoured; drawn values for every key."""

import math
import re
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import Strategy

from dist_template.cli.defaults import always_on
from dist_template.cli.fit import CLI
from dist_template.cli.ranges import arguments_of
from dist_template.compat.lightning_cli import keys_of
from dist_template.compat.ranges import ARGUMENTS
from dist_template.strategies import MeshStrategy
from dist_template.text import Source, TokenizerSpec
from tests.support.line import OURS
from tests.support.ranges import accepts, numbers, ranges
from tests.support.runs import logged, only_run, refused, run
from tests.support.tiers import tiers


class Stopped(Exception):
    """With what a test asks for, before the command trains."""


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> Any:
    def parse(self: Any, parser: Any, args: Any) -> None:
        raise Stopped(self._subcommand_parsers["fit"])

    monkeypatch.setattr(CLI, "parse_arguments", parse)
    OURS.start()
    with pytest.raises(Stopped) as stopped:
        CLI(OURS, ["fit"], run=True)
    return stopped.value.args[0]


# Options that the Trainer keeps under their names.
WORDS = """precision=bf16-mixed max_epochs=3 min_epochs=1 max_steps=9 min_steps=2
    num_nodes=1 limit_train_batches=0.5 limit_val_batches=2 limit_test_batches=3
    limit_predict_batches=4 val_check_interval=4 check_val_every_n_epoch=1 num_sanity_val_steps=2
    log_every_n_steps=3 gradient_clip_val=0.5 gradient_clip_algorithm=value default_root_dir=/x
    reload_dataloaders_every_n_epochs=1 enable_autolog_hparams=false"""
KEPT: dict[str, str] = dict(re.findall(r"(\w+)=(\S+)", WORDS))
# Options that name a class: a value, and the class that the Trainer has then.
NAMED = {
    "accelerator": ("cpu", "CPUAccelerator"),
    "strategy": ("ddp", "DDPStrategy"),
    "logger": ("{class_path: CSVLogger, init_args: {save_dir: x}}", "CSVLogger"),
    "callbacks": ("[LearningRateMonitor]", "LearningRateMonitor"),
    "enable_progress_bar": ("true", "ProgressBar"),
    "enable_model_summary": ("true", "ModelSummary"),
    "profiler": ("simple", "SimpleProfiler"),
    "plugins": (f"[{__name__}.Plugin]", "Plugin"),
}
# The others: a value, and how the Trainer, the module or the configuration shows that it works.
SHOWN: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "seed_everything": ("5", lambda cli: cli.config.fit.seed_everything == 5),
    "weights_only": ("true", lambda cli: cli.config.fit.weights_only is True),
    "optimizer": ("ASGD", lambda cli: "optim.ASGD" in str(cli.model.optim.optimizer_class)),
    "lr_scheduler": ("ConstantLR", lambda cli: "ConstantLR" in str(vars(cli.model.optim))),
    "trainer.devices": ("1", lambda cli: cli.trainer.num_devices == 1),
    "trainer.accumulate_grad_batches": (
        "4",
        lambda cli: cli.datamodule.global_batch_size == 4 * cli.datamodule.micro_batch_size,
    ),
    "trainer.max_time": (
        "00:01:00:00",
        lambda cli: cli.config_init.fit.preemption.max_time == "00:01:00:00",
    ),
    "trainer.enable_checkpointing": (
        "false",
        lambda cli: "LastCheckpoint" not in classes(cli.trainer),
    ),
    "trainer.deterministic": (
        "warn",
        lambda cli: torch.is_deterministic_algorithms_warn_only_enabled(),
    ),
    "trainer.benchmark": ("true", lambda cli: torch.backends.cudnn.benchmark),
    "trainer.inference_mode": ("false", lambda cli: not cli.trainer.validate_loop.inference_mode),
    "trainer.detect_anomaly": ("true", lambda cli: cli.trainer._detect_anomaly),
    "trainer.sync_batchnorm": ("true", lambda cli: cli.trainer.strategy._layer_sync is not None),
}
HONOURED = {f"trainer.{name}": value for name, value in KEPT.items()}
HONOURED |= {f"trainer.{name}": value for name, (value, _) in NAMED.items()}
HONOURED |= {key: value for key, (value, _) in SHOWN.items()}
ELSEWHERE = {"config", "ckpt_path", "trainer.fast_dev_run"}  # test_cli.py, below
REFUSED = "overfit_batches barebones use_distributed_sampler model_registry"


class Plugin(LightningEnvironment):
    """A cluster environment of a user's."""


def classes(trainer: Any) -> set[str]:
    """Names of the classes that a Trainer's objects have, and of their bases."""
    objects = [trainer.accelerator, trainer.strategy, trainer.strategy.cluster_environment]
    objects += [trainer.profiler, *trainer.loggers, *trainer.callbacks]
    return {kind.__name__ for one in objects for kind in type(one).__mro__}


def test_every_option_is_in_one_of_the_tables(parser: Any) -> None:
    """A new version of Lightning may have new ones."""
    keys = {action.dest for action in parser._actions if not action.dest.endswith("help")}
    ours = {"model", "data", "run", "cluster", "trainer", "print_config", *always_on()}
    lightnings = set[str]()
    for key in keys:
        if key.startswith("trainer.") or key.partition(".")[0] not in ours:
            lightnings.add(key)
    refused = {f"trainer.{name}" for name in REFUSED.split()}  # test_sentences.py
    assert lightnings == {*HONOURED, *ELSEWHERE, *refused}


def test_every_option_that_is_not_refused_is_honoured(flags: list[str], monkeypatch: Any) -> None:
    def built(*more: str) -> Any:
        with pytest.raises(Stopped) as stopped:
            run("fit", *flags, *more)
        return stopped.value.args[0]

    def stop(self: CLI, subcommand: str) -> None:
        raise Stopped(self)

    monkeypatch.setattr(CLI, "_run_subcommand", stop)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    try:
        cli = built(*(f"--{key}={value}" for key, value in HONOURED.items()))
        assert [key for key, (_, is_honoured) in SHOWN.items() if not is_honoured(cli)] == []
    finally:
        torch.use_deterministic_algorithms(False)
    kept = {name: yaml.safe_load(value) for name, value in KEPT.items()}
    assert {name: getattr(cli.trainer, name) for name in kept} == kept
    assert {name for _, name in NAMED.values()} - classes(cli.trainer) == set()
    assert built("--trainer.fast_dev_run=2").trainer.fast_dev_run == 2


@pytest.mark.slow
def test_a_run_trains_by_the_named_optimizer_and_schedule(flags: list[str], tmp_path: Path) -> None:
    chosen = ["--optimizer=torch.optim.SGD", "--optimizer.momentum=0.9", "--lr_scheduler=StepLR"]
    chosen += ["--lr_scheduler.step_size=1", "--lr_scheduler.gamma=0.5"]
    chosen += ["--model.optim.learning_rate=0.5", "--trainer.max_steps=3"]
    assert run("fit", *flags, *chosen) == 0
    rates = list(logged(only_run(tmp_path), "train/learning_rate").values())
    assert rates == [0.5, 0.25, 0.125], "stepped after each optimizer step"
    settings = f"--config={only_run(tmp_path)}/config.yaml"
    assert run("fit", settings, "--trainer.max_steps=4", "--ckpt_path=last") == 0
    assert logged(only_run(tmp_path), "train/learning_rate")[4] == 0.0625


@pytest.mark.slow
def test_accumulated_micro_batches_train_as_one_large_batch(
    flags: list[str], tmp_path: Path
) -> None:
    """Also where data.global_batch_size is another number: what is accumulated sets it."""
    short = ["--trainer.max_steps=4", "--trainer.limit_val_batches=0"]
    assert run("fit", *flags, *short, "--trainer.accumulate_grad_batches=3") == 0
    accumulated = only_run(tmp_path)
    config = yaml.safe_load((accumulated / "config.yaml").read_text("utf-8"))
    assert config["data"]["global_batch_size"] == 6 and config["data"]["micro_batch_size"] == 2
    large = ["--data.global_batch_size=6", "--data.micro_batch_size=6"]
    assert run("fit", *flags, *short, *large, f"--run.root={tmp_path}/large") == 0
    (at_once,) = (tmp_path / "large").glob("*/*/metrics.jsonl")
    for name in ("train/loss", "train/grad_norm"):
        values = logged(accumulated, name)
        assert list(values) == [1, 2, 3, 4]
        assert values == pytest.approx(logged(at_once.parent, name), rel=1e-5)


@pytest.mark.slow
def test_one_command_starts_a_training_and_continues_it(
    flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    flags += ["--ckpt_path=last", "--trainer.limit_val_batches=0"]
    assert run("fit", *flags, "--trainer.max_steps=2") == 0
    assert "no checkpoint under" in capfd.readouterr().out
    assert run("fit", *flags, "--trainer.max_steps=4") == 0
    assert "training starts at step 0" not in capfd.readouterr().out
    assert list(logged(only_run(tmp_path), "train/loss")) == [1, 2, 3, 4]
    (saved,) = (only_run(tmp_path) / "checkpoints").glob("step*4.ckpt")
    for each in saved.parent.glob("*.ckpt"):
        (each / "manifest.json").write_text("{")
    error = refused("fit", flags, capfd)
    assert "no checkpoint" in error, "what is damaged is no reason to start anew"


RANGES = ranges()

# Lightning checks these itself, and most of them take -1, "auto" or null besides.
LIGHTNINGS = """max_epochs min_epochs max_steps min_steps max_time fast_dev_run overfit_batches
limit_val_batches limit_test_batches limit_predict_batches plugins precision"""
# The classes check these.
CHECKED = {f"trainer.strategy.{name}" for name in signature(MeshStrategy).parameters}
CHECKED |= {"preemption.max_time", "data.source.weights", "data.source.schedule"}
CHECKED |= {"data.tokenizer.vocab_size"}
CLASS_PATHS = {"data.source": Source, "data.tokenizer": TokenizerSpec}
CLASS_PATHS |= {"trainer.strategy": Strategy, "trainer.logger": Logger}


def below(kind: type, library: str = "dist_template") -> Iterator[type]:
    for one in kind.__subclasses__():
        if one.__module__.startswith(f"{library}.") and "__init__" in vars(one):
            yield one
        yield from below(one, library)


def test_every_numeric_key_has_a_range_that_its_default_is_in(parser: Any) -> None:
    keys = {action.dest: action.default for action in keys_of(parser)}
    # what is below a key is in a dataclass or a list
    found = {key: checks for key, checks in RANGES.items() if ".".join(key.split(".")[:2]) in keys}
    for section, base in CLASS_PATHS.items():
        for kind in below(base):
            for name, hint in arguments_of(kind).items():
                if name in signature(kind).parameters:
                    found |= dict(numbers(hint, f"{section}.{name}"))
    lacking = {key for key, checks in found.items() if not checks}
    lacking -= CHECKED | {f"trainer.{name}" for name in LIGHTNINGS.split()}
    assert lacking == set()
    assert len(found) > 80 and "model.optim.learning_rate.until" in found
    for key, default in keys.items():
        defaults = default if isinstance(default, tuple | list) else [default]
        for value in defaults:
            if isinstance(value, int | float):
                assert accepts(RANGES.get(key, []), value), key


def test_each_argument_of_another_library_that_has_a_range_exists() -> None:
    for base, types in ARGUMENTS.items():
        existing = {*arguments_of(base)}
        for kind in below(base, base.__module__.partition(".")[0]):
            existing |= {*arguments_of(kind)}
        assert types.keys() <= existing, base


LONGEST = 2_100  # characters of a sentence: a value that is longer is shown without its middle
SECTIONS = "data model trainer run cluster model.optim model.adapter model.architecture".split()
SECTIONS += "model.adapter.rank model.adapter.targets model.architecture.hidden_size".split()
SECTIONS += "model.architecture.model_type data.source.paths data.tokenizer.vocab_size".split()
SECTIONS += ["trainer.strategy.init_args.tp_size"]
TEXTS = ["", "null", "../..", "/proc/x", "a\0b", "\ud800", "x" * 5_000]
TEXTS += ["%s{}{run}", "[", "!!int x", "-1"]
NUMBERS = [0, -1, 1, 10**9, -(10**9), 10**30, 2**63, 1e300]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(TEXTS)
drawn_numbers = st.integers() | st.floats() | st.sampled_from(NUMBERS)
keys = texts | st.sampled_from(["class_path", "init_args"])
values = st.recursive(
    st.none() | st.booleans() | drawn_numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=4,
)

# An example takes 0.1 s: finding a shorter one that fails too takes minutes.
QUICK = settings(deadline=None, suppress_health_check=[*HealthCheck], phases=[Phase.generate])


class Accepted(BaseException):
    """Raised where a command would begin to train."""


@pytest.fixture
def parsers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What LightningCLI builds from the classes' signatures, built once."""
    kept: dict[str, Any] = {}
    setup = CLI.setup_parser

    def once(self: Any, *args: Any) -> None:
        if not kept:
            before = set(vars(self))
            setup(self, *args)
            for name in vars(self).keys() - before:
                kept[name] = vars(self)[name]
        vars(self).update(kept)

    monkeypatch.setattr(CLI, "setup_parser", once)
    monkeypatch.delenv("TRACEBACK", raising=False)
    monkeypatch.chdir(tmp_path)  # a drawn folder such as `[]` is made where the command runs
    return kept


@pytest.fixture
def outcome(flags: list[str], parsers: Any, tmp_path: Path, capfd: Any) -> Callable[..., str]:
    """The sentence that refuses `key: value`, or "" where it is accepted."""

    def of(key: str, value: Any, in_file: bool) -> str:
        text = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
        more = f"--{key}=" + text.removesuffix("\n...\n").strip()
        if in_file:
            for name in reversed(key.split(".")):
                value = {name: value}
            (tmp_path / "drawn.yaml").write_text(yaml.safe_dump(value), encoding="utf-8")
            more = f"--config={tmp_path}/drawn.yaml"
        try:
            sentence = refused("fit", [*flags, more], capfd)
        except Accepted:
            return ""
        assert sentence.startswith("error: ") and len(sentence) <= LONGEST, (more, sentence)
        return sentence

    return of


@pytest.mark.slow
@pytest.mark.parametrize("examples", tiers([60, 4_000], daily=[60]))
def test_no_value_of_a_key_gives_a_traceback(
    outcome: Any, parsers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, examples: int
) -> None:
    def accept(self: CLI, subcommand: str) -> None:
        raise Accepted

    monkeypatch.setattr(CLI, "_run_subcommand", accept)
    outcome("run.report", False, False)
    names = {action.dest for action in keys_of(parsers["_subcommand_parsers"]["fit"])}
    names -= {"config", "print_config", *(name for name in names if name.endswith("help"))}

    @settings(QUICK, max_examples=examples, derandomize=True)
    @given(st.sampled_from([*sorted(names), *SECTIONS]), values, st.booleans())
    def drawn(key: str, value: Any, in_file: bool) -> None:
        sentence = outcome(key, value, in_file)
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert sentence or accepts(RANGES.get(key, []), value), (key, value)

    drawn()
