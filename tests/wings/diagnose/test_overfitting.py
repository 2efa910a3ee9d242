"""Overfitting is named, and no noise of a healthy run is taken for it.

The curves are synthetic; fault_runs.py has a real training that overfits, and its cure."""

from typing import Any

import numpy as np
import pytest

from dist_template.wings.diagnose import Finding, History, engine
from tests.support.histories import a_run, loss

STEPS = 1000
SEEDS = range(20)


def with_validations(values: np.ndarray, train: Any = loss, **more: Any) -> History:
    """A run with these validations, evenly over its steps, after the one before training."""
    history = a_run(STEPS, 10, columns={"train/loss": train}, **more)
    history.metrics._entries.pop("eval/loss")
    for step, value in zip(np.linspace(0, STEPS, len(values) + 1)[1:], values, strict=True):
        history.metrics.add({"step": int(step), "eval/loss": float(value)})
    return history


def overfits(history: History) -> list[Finding]:
    return [*engine.RULES["overfits"](history)]


def planted(done: np.ndarray) -> np.ndarray:
    """From 3.0 to 0.05."""
    return 0.05 + 2.95 * np.exp(-done / 0.15)


def noisy(values: np.ndarray, share: float, seed: int) -> np.ndarray:
    return values * (1 + share * np.random.default_rng(seed).standard_normal(len(values)))


def falls(at: np.ndarray) -> np.ndarray:
    return 2.2 + np.exp(-at / 0.2)


def plateaus(at: np.ndarray) -> np.ndarray:
    return 2.2 + np.exp(-at / 0.02)


def test_overfitting_is_named_and_a_noisy_healthy_run_is_not() -> None:
    rises = np.linspace(2.0, 3.6, 10)
    history = with_validations(rises, planted)
    (finding,) = overfits(history)
    assert finding in engine.diagnose(history), "no other finding explains it"
    assert (finding.level, finding.confidence) == ("warning", "certain")
    assert "eval/loss was 2 at step 100 and is 3.6 at step 1000" in finding.evidence
    assert "train/loss fell from 1.669" in finding.evidence and "to 0.05" in finding.evidence
    stop, regularize, more = finding.causes
    flags = [change.flag for change in stop.changes]
    assert flags == ["--config preset/early_stopping", "--trainer.max_steps 100"]
    assert "best-step00000100" in stop.sentence
    assert "weight decay" in regularize.sentence and "more data" in more.sentence
    assert finding.line.endswith("try --config preset/early_stopping"), "what the console prints"
    for seed in SEEDS:
        assert overfits(with_validations(noisy(rises, 0.03, seed), planted)), seed
        for healthy in (falls, plateaus):
            at = np.linspace(0.1, 1, 10)
            history = with_validations(noisy(healthy(at), 0.03, seed))
            assert not overfits(history), (healthy.__name__, seed)


@pytest.mark.parametrize("number", [2, 3, 5, 30, 100])
@pytest.mark.parametrize("share", [0.003, 0.03])
def test_no_number_of_healthy_validations_overfits(number: int, share: float) -> None:
    at = np.linspace(1 / number, 1, number)
    for seed in SEEDS:
        for healthy in (falls, plateaus):
            assert not overfits(with_validations(noisy(healthy(at), share, seed))), seed


def test_two_or_three_validations_are_too_few() -> None:
    for number in (2, 3):
        assert not overfits(with_validations(np.linspace(2.0, 3.6, number), planted))


def test_a_rise_of_both_losses_is_divergence() -> None:
    both = with_validations(np.linspace(2.0, 3.6, 10), lambda done: 2 + 2 * done)
    assert not overfits(both)


def test_a_fall_and_a_later_rise_name_the_lowest_step() -> None:
    values = np.concatenate([np.linspace(3.0, 2.0, 6), np.linspace(2.1, 2.5, 6)])
    (finding,) = overfits(with_validations(values, planted))
    assert finding.steps == (500, 1000)
    changes = {change.key: change for cause in finding.causes for change in cause.changes}
    assert changes["trainer.max_steps"].to == 500


def test_the_keys_to_regularize_are_the_runs() -> None:
    rises = np.linspace(2.0, 3.6, 10)
    config = {
        "model.optim.weight_decay": 0.1,
        "model.adapter.rank": 8,
        "model.adapter.dropout": 0.0,
        "trainer.max_epochs": 40,
    }
    facts = {"data.train_tokens": 1000, "data.seq_len": 64}
    tokens = {"train/loss": planted, "train/tokens": lambda done: 1e6 * done}
    history = with_validations(rises, planted, config=config, facts=facts)
    for step in range(10, STEPS + 1, 10):
        history.metrics.add({"step": step, "train/tokens": tokens["train/tokens"](step / STEPS)})
    (finding,) = overfits(history)
    changes = {change.key: change.to for cause in finding.causes for change in cause.changes}
    assert changes["model.optim.weight_decay"] == 0.3
    assert (changes["model.adapter.dropout"], changes["trainer.max_epochs"]) == (0.1, 4)
    assert "read 100.0 times" in finding.causes[-1].sentence


def test_a_modules_own_name_of_the_validation_loss_is_known() -> None:
    history = with_validations(np.linspace(2.0, 3.6, 10), planted)
    history.metrics._entries["val_loss"] = history.metrics._entries.pop("eval/loss")
    (finding,) = overfits(history)
    assert finding.evidence.startswith("val_loss was")


def test_learning_one_batch_by_heart_on_purpose_is_none() -> None:
    config = {"data.repeat_first_batch": True}
    assert not overfits(with_validations(np.linspace(2.0, 3.6, 10), planted, config=config))
