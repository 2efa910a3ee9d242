"""Lightning's callbacks and flags that cannot work are refused before the start, in a sentence
whose keys the module has."""

import re
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.utilities.model_helpers import is_overridden

from dist_template.cli.limits import Machine
from dist_template.strategies import MeshStrategy, ZeroStrategy
from tests.support.classifier import Images, PlainClassifier
from tests.support.limits import violations_of

MORE = GradientAccumulationScheduler({1: 2})
CPU = Machine("cpu", 2)
REFUSED = [
    (StochasticWeightAveraging(0.1), "ddp", "StochasticWeightAveraging .*: use EMAWeightAveragin"),
    (LearningRateFinder(), "ddp", "runs with different rates by the verb `compare`"),
    (BatchSizeFinder(), "ddp", "runs with different batch sizes by the verb `compare`"),
    (SpikeDetection(), "ddp", "SpikeDetection is not supported: set numerics.on_spike"),
    (EMAWeightAveraging(), MeshStrategy(), "EMAWeightAveraging does not work under MeshStrategy"),
    (EMAWeightAveraging(), ZeroStrategy(), "EMAWeightAveraging does not work under ZeroStrategy"),
    (ModelPruning("l1_unstructured"), "ddp", "prune the trained model by torch.nn.utils.prune"),
    (MORE, ZeroStrategy(), "accumulation are fixed when training starts: use --config strategy/f"),
    (BackboneFinetuning(), ZeroStrategy(), "groups of parameters .* are fixed when training star"),
]
FLAGS: list[tuple[dict[str, Any], Any, Machine, str]] = [
    ({"sync_batchnorm": True}, MeshStrategy(), CPU, "sync_batchnorm true has no effect under Mes"),
    ({"sync_batchnorm": True}, ZeroStrategy(), CPU, "sync_batchnorm true has no effect under Zer"),
    (
        {"inference_mode": True},
        MeshStrategy(),
        Machine("cuda", 2),
        "inference_mode .* remove the k",
    ),
]
POSSIBLE = [
    (MORE, "ddp"),
    (MORE, MeshStrategy()),
    (BackboneFinetuning(), MeshStrategy()),
    (EMAWeightAveraging(), "ddp"),
]


def of_a_plain_module(strategy: Any, machine: Machine = CPU, **given: Any) -> list[str]:
    module, data = PlainClassifier(), Images()
    return violations_of(strategy, machine, module=module, data=data, config=None, **given)


@pytest.mark.parametrize(("callback", "strategy", "words"), REFUSED)
def test_a_callback_that_cannot_work_is_refused(callback: Any, strategy: Any, words: str) -> None:
    (sentence,) = of_a_plain_module(strategy, callbacks=[callback])
    assert re.search(words, sentence), sentence
    assert "model.optim" not in sentence and "data." not in sentence  # which the module lacks


@pytest.mark.parametrize(("flags", "strategy", "machine", "words"), FLAGS)
def test_a_flag_without_an_effect_is_refused(
    flags: dict[str, Any], strategy: Any, machine: Machine, words: str
) -> None:
    (sentence,) = of_a_plain_module(strategy, machine, **flags)
    assert re.search(words, sentence), sentence
    assert of_a_plain_module("ddp", machine, **flags) == []


@pytest.mark.parametrize(("callback", "strategy"), POSSIBLE)
def test_a_callback_that_works_is_not_refused(callback: Any, strategy: Any) -> None:
    assert of_a_plain_module(strategy, callbacks=[callback]) == []


@pytest.mark.parametrize(
    "callback", [OnExceptionCheckpoint("x"), ModelCheckpoint(save_on_exception=True)]
)
def test_a_rank_that_fails_alone_does_not_save_alone(callback: Any) -> None:
    (sentence,) = of_a_plain_module("ddp", callbacks=[callback])
    assert "does not work on 2 processes" in sentence and "last_checkpoint.every_n_" in sentence
    assert of_a_plain_module("auto", Machine("cpu", 1), callbacks=[callback]) == []
    assert of_a_plain_module("ddp", callbacks=[ModelCheckpoint()]) == []


def test_saving_is_not_off_and_on_at_once() -> None:
    given: dict[str, Any] = {"enable_checkpointing": False, "callbacks": ModelCheckpoint()}
    (sentence,) = of_a_plain_module("ddp", **given)
    assert "trainer.callbacks has ModelCheckpoint, which saves: remove one" in sentence


class BringsOne(PlainClassifier):
    def configure_callbacks(self) -> Any:
        return StochasticWeightAveraging(0.1)


class AsksItsTrainer(PlainClassifier):
    def configure_callbacks(self) -> Any:
        return [EMAWeightAveraging(decay=self.trainer.num_devices / 9)]


def test_a_callback_of_the_module_is_refused_too() -> None:
    given = {"module": BringsOne(), "data": Images(), "config": None}
    (sentence,) = violations_of("ddp", CPU, **given)
    assert "StochasticWeightAveraging is not supported" in sentence
    assert violations_of("ddp", CPU, **given | {"module": AsksItsTrainer()}) == []


class Counts(PlainClassifier):
    calls = 0

    def configure_callbacks(self) -> Any:
        self.calls += 1
        return [EMAWeightAveraging()]


def test_the_hook_of_the_module_runs_once_until_lightning_has_its_callbacks() -> None:
    module = Counts()
    given = {"module": module, "data": Images(), "config": None}
    assert violations_of("ddp", CPU, **given) == violations_of("ddp", CPU, **given) == []
    assert is_overridden("configure_callbacks", module, L.LightningModule)
    trainer: Any = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy._lightning_module = module
    trainer._callback_connector._attach_model_callbacks()
    assert module.calls == 1
    assert any(isinstance(each, EMAWeightAveraging) for each in trainer.callbacks)
    module.configure_callbacks()  # a second fit makes its own
    assert module.calls == 2


def test_a_language_model_is_told_its_own_keys() -> None:
    (sentence,) = violations_of(callbacks=[MORE])
    assert "give phases of data.global_batch_size" in sentence
