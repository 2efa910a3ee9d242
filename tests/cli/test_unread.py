"""A key that nothing reads is refused: keys of methods that a module has its own code for."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib import import_module
from typing import Any

import lightning as L
import pytest
import torch
from trainer_dev.data import DataModule
from trainer_dev.module import LanguageModule
from transformers import AutoConfig

from dist_template import BalanceConfig, OptimConfig
from dist_template.by_tokens import Phase
from dist_template.callbacks.experts import refuse_without_experts
from dist_template.callbacks.numerics import Numerics
from dist_template.cli.defaults import always_on
from dist_template.cli.fit import CLI
from dist_template.cli.limits import notes
from dist_template.cli.limits.unread import class_without_effect
from dist_template.compat.lightning_cli import keys_of
from dist_template.errors import InputError
from tests import PROJECT, ROOT
from tests.support.classifier import Classifier
from tests.support.limits import EIGHT_GPUS, LLAMA, violations_of
from tests.support.line import OURS

LIBRARY = ROOT / "src" / "dist_template"

OTHER_VALUES: dict[str, Any] = {
    "optimizer": "muon",
    "learning_rate": 0.01,
    "weight_decay": 0.3,
    "betas": (0.5, 0.6),
    "eps": 1e-3,
    "schedule": "constant",
    "warmup": 0.2,
    "min_learning_rate_share": 0.3,
    "decay_share": 0.5,
}
KEYS = [each.name for each in fields(OptimConfig) if each.init]


class Own(LanguageModule):
    """With an optimizer of its own, as docs show."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


class ReadsTheRate(LanguageModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.optim.learning_rate)


class PassesAll(LanguageModule):
    def configure_optimizers(self) -> Any:
        config = self.optim
        return torch.optim.SGD(self.parameters(), config.learning_rate)


class Extends(LanguageModule):
    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        return found["optimizer"]


class OwnSteps(LanguageModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).sum()

    def generate(self, input_ids: Any) -> Any:
        return input_ids


class OwnClip(LanguageModule):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.1)


class ClipsByArgument(LanguageModule):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val, "norm")


def about(key: str, module: L.LightningModule, **trainer: Any) -> list[str]:
    return [each for each in violations_of(module=module, **trainer) if f"{key} is" in each]


def own(sentences: list[str]) -> list[str]:
    return [each for each in sentences if "has its own" in each]


def test_a_value_of_each_key_of_the_optimizer_is_known() -> None:
    assert OTHER_VALUES.keys() == {*KEYS}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_the_optimizer_that_own_code_does_not_read_is_refused(key: str) -> None:
    changed = replace(OptimConfig(), **{key: OTHER_VALUES[key]})
    (sentence,) = own(about(f"model.optim.{key}", Own(optim=changed)))
    assert "Own has its own configure_optimizers, which does not read it" in sentence
    assert not own(about(f"model.optim.{key}", PassesAll(optim=changed)))
    if key not in ("decay_share",):  # the default schedule does not read it
        assert not about(f"model.optim.{key}", Extends(optim=changed))
        assert not about(f"model.optim.{key}", LanguageModule(optim=changed))
    is_read = key == "learning_rate"
    assert bool(own(about(f"model.optim.{key}", ReadsTheRate(optim=changed)))) != is_read


@pytest.mark.parametrize("flag", ["optimizer", "lr_scheduler"])
def test_a_class_that_own_code_does_not_build_is_refused(flag: str) -> None:
    assert f"--{flag} has no effect" in class_without_effect(Own(), flag)
    assert not class_without_effect(Extends(), flag)
    assert not class_without_effect(LanguageModule(), flag)


@pytest.mark.parametrize(
    ("key", "value"), [("loss_chunk", 7), ("sample_tokens", 3), ("sample_temperature", 0.1)]
)
def test_a_key_of_a_replaced_step_is_refused(key: str, value: Any) -> None:
    assert about(f"model.{key}", OwnSteps(**{key: value}))
    assert not about(f"model.{key}", LanguageModule(**{key: value}))


def test_a_clip_that_own_clipping_does_not_read_is_refused() -> None:
    key = "trainer.gradient_clip_val"
    assert about(key, OwnClip(), gradient_clip_val=0.5)
    assert not about(key, ClipsByArgument(), gradient_clip_val=0.5)
    assert not about(key, LanguageModule(), gradient_clip_val=0.5)


@pytest.mark.parametrize(
    ("key", "given", "reads_it"),
    [
        ("decay_share", {"schedule": "cosine"}, {"schedule": "warmup_stable_decay"}),
        ("min_learning_rate_share", {"schedule": "linear"}, {"schedule": "cosine"}),
        ("min_learning_rate_share", {"schedule": "constant"}, {"schedule": "warmup_stable_decay"}),
    ],
)
def test_a_key_of_another_schedule_is_refused(key: str, given: Any, reads_it: Any) -> None:
    name = f"model.optim.{key}"
    assert about(name, LanguageModule(optim=OptimConfig(**given, **{key: 0.4})))
    assert not about(name, LanguageModule(optim=OptimConfig(**reads_it, **{key: 0.4})))


BALANCE = [f"model.balance.{each.name}" for each in fields(BalanceConfig)]
STEPS = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 3}}
SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "weight_decay": 0.0}}
ADAFACTOR = {"class_path": "torch.optim.Adafactor", "init_args": {"lr": 0.1}}
MOE = AutoConfig.for_model("mixtral", num_local_experts=4)
PHASES = [Phase(1e-3, 1e6), Phase(1e-4)]


@pytest.mark.parametrize("key", BALANCE)
def test_a_flag_of_experts_is_refused_without_experts(key: str) -> None:
    (sentence,) = violations_of(typed={key})
    assert sentence == f"{key} has no effect (the model has no experts): remove the flag"
    assert not violations_of(config=MOE, typed={key})
    assert not violations_of(typed=())  # as a file for several models has it


def test_what_a_file_sets_of_experts_is_told() -> None:
    module = LanguageModule(balance=BalanceConfig(bias_update_speed=0.003))
    given: Any = (EIGHT_GPUS, {}, module, DataModule())
    (line,) = notes(*given, LLAMA, frozenset())
    assert (
        line
        == "note: model.balance.bias_update_speed 0.003 has no effect: the model has no experts"
    )
    assert not notes(*given, MOE, frozenset())
    assert not notes(*given[:2], LanguageModule(), given[3], LLAMA, frozenset())


@pytest.mark.parametrize(
    ("key", "optim", "flag"),
    [
        ("schedule", {"lr_scheduler_class": STEPS}, ""),
        ("warmup", {"lr_scheduler_class": STEPS}, ""),
        ("schedule", {"learning_rate": PHASES}, ""),
        ("learning_rate", {"optimizer_class": SGD}, "optimizer.lr"),
        ("weight_decay", {"optimizer_class": SGD}, "optimizer.weight_decay"),
    ],
)
def test_a_flag_that_another_replaces_is_refused(key: str, optim: Any, flag: str) -> None:
    config = OptimConfig()
    vars(config).update(optim)
    module = LanguageModule(optim=config)
    name = f"model.optim.{key}"
    found = [each for each in violations_of(module=module, typed={name, flag}) if name in each]
    assert found and "has no effect" in found[0] and found[0].endswith("remove the flag")
    assert not [each for each in violations_of(module=module) if name in each]


def test_a_typed_default_that_own_code_does_not_read_is_refused() -> None:
    key = "model.optim.learning_rate"
    default = OptimConfig().learning_rate
    (sentence,) = [each for each in violations_of(module=Own(), typed={key}) if key in each]
    assert f"{key} is {default!r} and has no effect: Own has its own" in sentence


def test_balancing_of_another_network_is_refused_when_it_is_built() -> None:
    refuse_without_experts(BalanceConfig(), Classifier())
    with pytest.raises(InputError, match="z_loss_coef has no effect: Classifier has no experts"):
        refuse_without_experts(BalanceConfig(z_loss_coef=0.1), Classifier())


@pytest.mark.parametrize("key", ["spike_window", "spike_sigmas"])
def test_a_key_of_spikes_that_are_not_detected_is_refused(key: str) -> None:
    given: Any = {key: 9}
    with pytest.raises(InputError, match=f"numerics.{key} is 9 and has no effect"):
        Numerics(**given)
    Numerics(on_spike="skip", **given)


# ---- callbacks of every run: each argument is read -----------------------------------------------

# Keys of callbacks whose reader is in another file.
READ_ELSEWHERE = {
    "preflight.device_mtbf_h": "wings/preflight/interval.py advises last_checkpoint.every_n_steps",
    "preflight.disk_gb_s": "likewise",
}


def keys_of_callbacks() -> Iterator[tuple[str, type, str]]:
    for section, plugin in always_on().items():
        module, _, name = plugin.point.value.partition(":")
        kind = getattr(import_module(module), name)
        for argument in inspect.signature(kind).parameters:
            yield section, kind, argument


def reads(kind: type, argument: str) -> bool:
    """Whether a class or its bases read the argument, or the attribute of that name, after it was
    set."""
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] not in ("dist_template",):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        for node in ast.walk(tree):
            is_argument = isinstance(node, ast.Attribute) and node.attr == argument
            if is_argument and isinstance(node.ctx, ast.Load):
                return True
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                stored = {
                    id(one.value)
                    for one in ast.walk(node)
                    if isinstance(one, ast.Assign)
                    and any(ast.unparse(to) == f"self.{argument}" for to in one.targets)
                }
                for one in ast.walk(node):
                    is_name = isinstance(one, ast.Name) and one.id == argument
                    if is_name and isinstance(one.ctx, ast.Load) and id(one) not in stored:
                        return True
    return False


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All keys of `fit`, but Lightning's."""
    found: list[str] = []

    def parse(self: Any, parser: Any, args: Any) -> None:
        found.extend(action.dest for action in keys_of(self._subcommand_parsers["fit"]))
        raise InterruptedError

    monkeypatch.setattr(CLI, "parse_arguments", parse)
    OURS.start()
    with pytest.raises(InterruptedError):
        CLI(OURS, ["fit"], run=True)
    sections = {"model", "data", "run", "cluster", *always_on()}
    return [key for key in found if key.partition(".")[0] in sections and "." in key]


def test_each_key_is_read_by_name(keys: list[str]) -> None:
    """The name of each key is an attribute, or a text such as a file's key, in some statement."""
    assert len(keys) > 100
    names = set[Any]()
    for file in [*LIBRARY.rglob("*.py"), *PROJECT.rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Call):
                names |= {one.value for one in node.args if isinstance(one, ast.Constant)}
            elif isinstance(node, ast.Dict | ast.Tuple | ast.Set | ast.List):
                parts = node.keys if isinstance(node, ast.Dict) else node.elts
                names |= {one.value for one in parts if isinstance(one, ast.Constant)}
    last = {key.rpartition(".")[2] for key in keys} - {"help"}
    assert sorted(last - names) == []


def test_each_key_of_a_callback_is_read() -> None:
    unread = {
        f"{section}.{argument}"
        for section, kind, argument in keys_of_callbacks()
        if not reads(kind, argument)
    }
    assert unread == {*READ_ELSEWHERE}
