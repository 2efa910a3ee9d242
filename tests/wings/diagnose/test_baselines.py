"""A language model is compared with predictors without a model, and no healthy run is accused.

The curves are synthetic, or recorded; fault_runs.py has the trainings with shuffled and unshifted
labels, a rate 100 times too high, and 20 healthy seeds."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dist_template.text.objectives.distillation import Distillation
from dist_template.wings.diagnose import Finding, History, engine
from dist_template.wings.history import Metrics
from tests.support.fault_runs import FAULTS, HEALTHY, SEEDS
from tests.support.histories import a_run, loss
from tests.support.recorded import recorded

UNIGRAM, COMPRESSED = 7.5, 4.0
FACTS = {
    "data.unigram_loss": UNIGRAM,
    "data.unigram_accuracy": 0.05,
    "data.compressed_loss": COMPRESSED,
    "data.labels_per_token": 1.0,
    "data.train_tokens": 10**9,
    "data.tokens_per_step": 2**19,
}
NO_BETTER, TOO_GOOD, JUMP = "no_better_than_unigram", "too_good_to_be_true", "early_loss_jump"
RULES = (NO_BETTER, TOO_GOOD, JUMP)
STEPS = 1000


def noisy(values: np.ndarray, seed: int = 0, share: float = 0.01) -> np.ndarray:
    return values * (1 + share * np.random.default_rng(seed).standard_normal(len(values)))


def stays(done: np.ndarray) -> np.ndarray:
    """From ln(50,257) to the unigram model's loss."""
    return noisy(UNIGRAM + 3.3 * np.exp(-done / 0.03))


def vanishes(done: np.ndarray) -> np.ndarray:
    """To 0.001 within 60 steps."""
    return noisy(10.8 * np.exp(-done / 0.005) + 0.001)


def text_run(train: Any, validated: Any = None, accuracy: Any = None, **more: Any) -> History:
    """Returns the run of a language model on 2**19 tokens a step, with its data's figures."""
    columns = {"train/loss": train, "eval/loss": validated or train, **more.pop("columns", {})}
    steps = more.get("steps", STEPS)
    columns["train/tokens"] = lambda done: 2.0**19 * steps * done
    if accuracy is not None:
        columns["train/token_accuracy"] = accuracy
    facts = FACTS | more.pop("facts", {})
    options: dict[str, Any] = {"steps": STEPS, "every": 10, "columns": columns, "facts": facts}
    return a_run(**options | more)


def found(history: History) -> dict[str, Finding]:
    return {finding.rule: finding for finding in engine.diagnose(history)}


def upto(history: History, step: int) -> History:
    """Returns the history as it was at a step."""
    metrics = Metrics()
    for name in history.metrics.names:
        series = history.metrics[name]
        for at, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            if at <= step:
                metrics.add({"step": at, name: value})
    return replace(history, metrics=metrics)


# ---- no better than token frequencies ------------------------------------------------------------


def test_a_loss_that_stays_at_the_unigram_models_is_an_error() -> None:
    finding = found(text_run(stays))[NO_BETTER]
    assert (finding.level, finding.confidence) == ("error", "certain")
    assert "has 7.5" in finding.evidence and "first value" in finding.evidence
    assert "shuffled labels" in finding.causes[0].sentence
    assert [*found(text_run(stays))] == [NO_BETTER], "one answer"
    for every in (1, 50, 250):
        assert NO_BETTER in found(text_run(stays, every=every)), every


def test_the_causes_are_the_runs() -> None:
    config = {"model.optim.learning_rate": 0.05}
    high = found(text_run(stays, config=config))[NO_BETTER]
    assert high.causes[0].changes[0].key == "model.optim.learning_rate"
    assert "too high" in high.causes[0].sentence
    learned = {"objective.no_better": Distillation.no_better}
    distilled = found(text_run(stays, facts=learned))[NO_BETTER]
    assert "teacher is no better" in distilled.causes[0].sentence
    config = {"model.pretrained": "org/model", "model.optim.learning_rate": 3e-5}
    tuned = found(text_run(stays, config=config))[NO_BETTER]
    assert "org/model" in tuned.causes[0].sentence and "tokenizer" in tuned.causes[0].sentence
    adapted = {"parameters.trainable": 1_000_000}
    config["model.adapter"] = {"rank": 8}
    tuned = found(text_run(stays, config=config, facts=adapted))[NO_BETTER]
    assert not any("frozen" in cause.sentence for cause in tuned.causes)
    low = text_run(
        lambda done: noisy(7 + 3.8 * np.exp(-done / 0.5), share=0.002),
        config={"model.optim.learning_rate": 1e-5},
    )
    assert "too low" in found(low)[NO_BETTER].causes[0].sentence
    short = found(text_run(stays, steps=400))[NO_BETTER]
    assert short.causes[-1].changes[0].flag == "--trainer.max_steps 1600"


def test_a_finetuned_model_is_judged_soon() -> None:
    config = {"model.pretrained": "org/model", "model.optim.warmup": 5}
    history = upto(text_run(stays, every=2, config=config), 60)
    assert NO_BETTER in found(history)
    history.config["model"]["pretrained"] = None
    assert NO_BETTER not in found(history)


NEAR = {
    "the start of a long training": {"upto": 0.2},
    "a loss that leaves it late": {
        "train": lambda done: stays(done) - 0.5 * np.maximum(done - 0.4, 0) / 0.6
    },
    "a short training with a low learning rate": {
        "train": lambda done: noisy(7 + 3.8 * np.exp(-done / 0.5), share=0.002),
        "steps": 120,
        "every": 2,
    },
    "a short training that does not know the frequencies yet": {
        "train": lambda done: noisy(8.1 + 2.7 * np.exp(-done / 0.1), share=0.002),
        "steps": 120,
        "every": 2,
    },
    "a loss a little below": {"train": lambda done: 0.95 * stays(done)},
    "no figures, as in a cache of an earlier version": {"facts": {"data.unigram_loss": None}},
    "few tokens of a large vocabulary": {"facts": {"data.labels_per_token": 1e-5}},
    "labels that are nearly all equal": {
        "train": lambda done: noisy(0.05 + 0.0 * done),
        "facts": {"data.unigram_loss": 0.05},
    },
    "DNA, which has little to learn": {
        "train": lambda done: noisy(1.36 + 9 * np.exp(-done / 0.01)),
        "facts": {"data.unigram_loss": 1.38, "data.compressed_loss": 1.45},
    },
    "an accuracy that no unigram model has": {"accuracy": 0.11},
    "a validation that is better": {"validated": lambda done: stays(done) - 2},
}


@pytest.mark.parametrize("name", NEAR)
def test_a_run_that_has_learned_or_may_learn_is_not_accused(name: str) -> None:
    made: Any = {"train": stays, **NEAR[name]}
    assert NO_BETTER not in found(text_run(made.pop("train"), **made))


def test_shuffled_labels_of_a_mixture_lose_the_source_too() -> None:
    made: Any = {"train": lambda done: stays(done) + 0.6, "steps": 120, "every": 2}
    assert NO_BETTER not in found(text_run(made.pop("train"), **made))
    config = {"data.source": {"weights": {"web": 1.0, "code": 1.0}}}
    history = text_run(lambda done: stays(done) + 0.6, steps=120, every=2, config=config)
    assert NO_BETTER in found(history)


def test_a_divergence_is_not_called_so() -> None:
    history = text_run(lambda done: loss(done) + 6 * (done > 0.5))
    assert "loss_diverges" in found(history) and NO_BETTER not in found(history)


def test_a_loss_that_does_not_move_at_all_has_its_own_finding() -> None:
    rules = found(text_run(lambda done: noisy(np.full_like(done, 10.8), share=0.001)))
    assert "loss_not_decreasing" in rules and NO_BETTER not in rules


# ---- too good to be true -------------------------------------------------------------------------


def test_a_loss_of_nearly_0_within_few_steps_is_an_error() -> None:
    finding = found(text_run(vanishes, accuracy=0.9995))[TOO_GOOD]
    assert (finding.level, finding.confidence) == ("error", "likely")
    assert "0.9995" in finding.evidence and "passes over the train split" in finding.evidence
    assert "not shifted" in finding.causes[0].sentence
    assert "Nothing is wrong if" in finding.causes[-1].sentence
    assert [*found(text_run(vanishes, accuracy=0.9995))] == [TOO_GOOD], "one answer"


def test_a_leak_is_found_after_60_steps_and_stays_a_finding() -> None:
    history = text_run(vanishes, accuracy=0.9995)
    for step in (60, 100, 500):
        assert TOO_GOOD in found(upto(history, step)), step


SMALL = {"data.train_tokens": 2**19}  # a step reads it
NEAR_GOOD = {
    "one batch, to be learned by heart": {"config": {"data.repeat_first_batch": True}},
    "trained weights": {"config": {"model.pretrained": "org/model"}},
    "weights that module.py loads": {"validated": lambda done: 1.0 - 0.99 * done},
    "little data, read often": {"facts": SMALL, "validated": lambda done: 10.8 - 4 * done},
    "a pattern": {"facts": {"data.compressed_loss": 0.002}},
    "nearly equal labels": {"facts": {"data.unigram_loss": 0.5, "data.compressed_loss": 0.3}},
    "no figures": {"facts": {"data.compressed_loss": None}},
    "another loss": {"accuracy": 0.6},
    "a rule that is learned in time": {
        "train": lambda done: noisy(np.where(done < 0.4, loss(done), 0.001))
    },
    "answers that follow from prompts, learned after the first steps": {
        "train": lambda done: noisy(np.where(done < 0.17, loss(done), 0.001)),
        "facts": {"data.labels_per_token": 0.3},
    },
    "a source of a mixture that is read often": {
        "columns": {"data/small/epochs": lambda done: 1000 * done},
        "validated": loss,
    },
}


@pytest.mark.parametrize("name", NEAR_GOOD)
def test_what_can_be_learned_so_fast_is_not_accused(name: str) -> None:
    made: Any = {"train": vanishes, **NEAR_GOOD[name]}
    assert TOO_GOOD not in found(text_run(made.pop("train"), **made))


def test_a_small_corpus_is_judged_by_its_validation() -> None:
    history = text_run(vanishes, accuracy=1.0, facts=SMALL)
    assert TOO_GOOD in found(history), "validation is as good: rows are not known by heart"


# ---- the jump ------------------------------------------------------------------------------------


def jumping(height: float, at: int = 2, **more: Any) -> History:
    """Returns a run one of whose log steps is so many times higher."""

    def jumps(done: np.ndarray) -> np.ndarray:
        values = loss(done)
        values[at] *= height
        return values

    return a_run(steps=1000, columns={"train/loss": jumps}, **more)


@pytest.mark.parametrize("every", [5, 10, 25])
def test_a_jump_counts_if_the_next_logged_value_is_lower(every: int) -> None:
    """A log step has the mean since the last one: no single batch lifts it so far."""
    config = {"model.optim.warmup": 0.2}
    finding = found(jumping(1.6, every=every, config=config))[JUMP]
    assert f"at step {3 * every}" in finding.evidence


def test_one_high_batch_is_no_jump_and_a_rate_that_is_too_high_explains_it() -> None:
    config = {"model.optim.warmup": 0.2}
    assert JUMP not in found(jumping(1.6, at=100, every=1, config=config))
    high = config | {"model.optim.learning_rate": 0.05}
    assert JUMP in found(jumping(1.6, at=100, every=1, config=high))
    assert JUMP not in found(jumping(1.2, every=10, config=high)), "a rise by less"


@pytest.mark.parametrize("share", [0.01, 0.05, 0.15])
def test_noise_is_no_jump_even_with_a_high_rate(share: float) -> None:
    config = {"model.optim.warmup": 0.2, "model.optim.learning_rate": 0.05}
    num = 0
    for seed in range(30):

        def curve(done: np.ndarray, by: int = seed) -> np.ndarray:
            return noisy(3 + 7.8 * np.exp(-done / 0.05), by, share)

        num += JUMP in found(a_run(1000, 5, columns={"train/loss": curve}, config=config))
    assert num == 0


# ---- recorded trainings --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [each.name for each in HEALTHY])
def test_a_healthy_training_is_accused_at_no_log_step(name: str) -> None:
    history = recorded(name)
    assert history.fact("data.unigram_loss") and history.fact("data.compressed_loss")
    for step in history.metrics["train/loss"].steps[::2].tolist():
        rules = found(upto(history, step))
        assert not rules.keys() & {*RULES}, (step, rules)


def test_20_seeds_are_recorded() -> None:
    assert len(SEEDS) == 20
    seeds = {recorded(each.name).config["data"]["seed"] for each in SEEDS}
    assert seeds == {*range(20)}


@pytest.mark.parametrize("name", [each.name for each in FAULTS if each.rule in RULES[:2]])
def test_a_planted_fault_has_one_answer(name: str) -> None:
    (finding,) = engine.diagnose(recorded(name))
    assert finding.level == "error"
