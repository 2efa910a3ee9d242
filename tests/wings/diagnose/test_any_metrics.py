"""Report and diagnosis of modules that name their metrics and arguments as they like."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from dist_template.metric_names import loss_of, parts_of
from dist_template.wings.diagnose import History, engine, expected
from dist_template.wings.diagnose.report import curves, page, tables
from tests.support import histories

NO_TEXT = {"data.seq_len": None, "data.tokens_per_step": None, "data.train_tokens": None}


def plain(
    logged: dict[str, Any], model: Any = None, data: Any = None, steps: int = 400, **facts: Any
) -> History:
    """Returns the history of a plain module's run. `logged`: {name: (function of the completed
    share, steps between two values)}."""
    known = {"training.optimizers": ["Adam"], "parameters.total": 10_000, **NO_TEXT}
    history = History(
        Path("runs/a/b"),
        config={
            "trainer": {"max_steps": steps, "callbacks": None, "gradient_clip_val": None},
            "model": {"width": 8} if model is None else model,
            "data": {"batch_size": 8} if data is None else data,
        },
        facts=histories.nested(known | facts),
        environment={"job_started": 0.0, "cpu_count": 4},
        goodput={"start": 1.0, "productive": 100.0},
    )
    for name, (function, every) in logged.items():
        for step in range(every, steps + 1, every):
            line = {"step": step, "time": float(step), name: float(function(step / steps))}
            history.metrics.add(line)
    return history


def falls(done: float) -> float:
    return 1.0 * math.exp(-4 * done) + 0.05


def rises_late(done: float) -> float:
    return falls(done) + 0.8 * max(done - 0.4, 0.0)


def swings(done: float) -> float:
    """Each ten of 400 steps: 1, 3, 1, 3, …"""
    return 2 + (-1) ** round(400 * done / 10)


def spikes(done: float) -> float:
    """Once in each tenth of the run."""
    return 9 if 100 * done % 10 > 8 else falls(done)


def breaks(done: float) -> float:
    return falls(done) if done < 0.5 else math.nan


def rules(history: History) -> list[str]:
    return [finding.rule for finding in engine.diagnose(history)]


def sentences(history: History) -> list[str]:
    """Of all causes of all findings."""
    return [cause.sentence for finding in engine.diagnose(history) for cause in finding.causes]


@pytest.mark.parametrize(
    ("name", "stage", "measure"),
    [
        ("train_loss", "train", "loss"),
        ("train_loss_epoch", "train", "loss"),
        ("val/loss", "validation", "loss"),
        ("valid/top-5_acc", "validation", "top-5_acc"),
        ("acc_val", "validation", "acc"),
        ("val_loss/dataloader_idx_1", "validation", "loss"),
        ("loss_val_step", "validation", "loss"),
        ("Validation Loss", "validation", "Loss"),
        ("evaluation", "", "evaluation"),  # the beginning of a word is no stage
        ("trainable", "", "trainable"),
        ("g_loss", "", "g_loss"),
        ("Güte/größe", "", "Güte/größe"),
        ("val", "validation", "val"),
        ("", "", ""),
        ("///", "", "///"),
    ],
)
def test_a_name_says_stage_and_measure(name: str, stage: str, measure: str) -> None:
    assert parts_of(name) == (stage, measure)


def test_a_loss_is_found_among_names() -> None:
    assert (
        loss_of(["val_acc", "val_loss_epoch", "val_loss"], "eval/loss", "validation") == "val_loss"
    )
    assert loss_of(["val_loss", "eval/loss"], "eval/loss", "validation") == "eval/loss"
    assert loss_of(["val_acc", "g_loss"], "eval/loss", "validation") == ""


@pytest.mark.parametrize(
    ("train", "val"),
    [("train_loss", "val_loss"), ("loss", "valid/loss"), ("train/loss", "val/loss")],
)
def test_overfitting_is_found_in_the_modules_own_losses(train: str, val: str) -> None:
    findings = engine.diagnose(plain({train: (falls, 10), val: (rises_late, 20)}))
    (finding,) = [one for one in findings if one.rule == "overfits"]
    assert f"{val} was" in finding.evidence and f"while {train} fell" in finding.evidence
    assert rules(plain({train: (falls, 10), val: (falls, 20)})) == []


def test_divergence_is_found_in_the_modules_own_loss_and_not_in_a_gans() -> None:
    logged = {"train_loss": (lambda done: 0.2 + done**2, 10)}
    assert "loss_diverges" in rules(plain(logged))
    gan = plain({"train/loss": logged["train_loss"]}, **{"training.optimizers": ["Adam", "Adam"]})
    assert rules(gan) == [], "losses of several optimizers need not fall"


def test_the_usual_rate_of_adam_is_not_asked_of_sgd() -> None:
    logged = {
        "train/loss": (lambda done: 0.2 + done, 10),
        "train/learning_rate": (lambda done: 0.5, 10),
    }
    of_sgd = plain(logged, **{"training.optimizers": ["SGD"]})
    assert not [sentence for sentence in sentences(of_sgd) if "usual" in sentence]
    assert [sentence for sentence in sentences(plain(logged)) if "is usual" in sentence]


def test_the_usual_rate_of_adapters_is_ten_times_that_of_all_weights() -> None:
    whole = plain({"train_loss": (falls, 10)})
    adapters = histories.with_setting(whole, "model.adapter", {"rank": 8})
    assert expected.usual_rate(adapters) == pytest.approx(10 * expected.usual_rate(whole))


ILL: dict[str, dict[str, Any]] = {  # of every rule about what a plain module can show
    "diverges": {"train/loss": (lambda done: 0.2 + done, 10)},
    "still": {"train/loss": (lambda done: 1.0, 10), "train/learning_rate": (lambda d: 1e-7, 10)},
    "zero": {"train/loss": (lambda done: 0.0, 10)},
    "swings": {"train/loss": (swings, 10)},
    "spikes": {"train/loss": (spikes, 10)},
    "nan": {"train/loss": (breaks, 10)},
    "overfits": {"train_loss": (falls, 10), "val_loss": (rises_late, 20)},
    "waits": {
        "perf/data_wait_share": (lambda done: 0.6, 10),
        "perf/step_s": (lambda done: 0.5, 10),
    },
    "full": {"memory/peak_share": (lambda done: 0.99, 10)},
    "slow rank": {
        "rank/slowest": (lambda done: 1, 10),
        "rank/slowest_over_median": (lambda done: 2.0, 10),
    },
    "idle": {
        "gpu/utilization": (lambda done: 0.3, 10),
        "memory/peak_share": (lambda done: 0.2, 10),
        "perf/step_s": (lambda done: 0.5, 10),
    },
    "slow kernels": {
        "perf/mfu": (lambda done: 0.01, 10),
        "memory/peak_share": (lambda done: 0.2, 10),
    },
}
# Keys of the same names as a language model's, with other meanings.
ODD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "own": ({"width": 8}, {"batch_size": 8}),
    "none": ({}, {}),
    "other types": (
        {"optim": "adam", "pretrained": True, "blocks": [3, 4], "loss_chunk": "x"},
        {"num_workers": None, "micro_batch_size": "8", "seq_len": [24, 48], "cache_dir": None},
    ),
    "phases": (
        {"optim": {"learning_rate": [0.1, 0.2], "betas": 0.9, "warmup": "none"}},
        {"global_batch_size": {"a": 1}, "batch_size": 2.5},
    ),
}
KEY = re.compile(r"\b(?:model|data)(?:\.[a-z]\w*)+")


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("ill", ILL)
def test_no_sentence_names_a_key_that_the_module_lacks(ill: str, odd: str) -> None:
    model, data = ODD[odd]
    facts: dict[str, Any] = {
        "machine.supports_bf16": True,
        "machine.world_size": 2,
        "machine.device": "NVIDIA H100",
        "parameters.trainable": 10_000,
    }
    history = plain(ILL[ill], model, data, **facts)
    crash = {
        "kind": "out_of_memory", "time": 1.0, "rank": 0, "step": 3, "first_step": 0,
        "place": "backward", "phase": "backward", "module": "net",
        "memory": {"used_gib": 79.0, "total_gib": 80.0, "asked_gib": 2.0},
    }  # fmt: skip
    history.crashes = [crash]
    findings = engine.diagnose(history)
    if ill != "full":  # which the crash says by itself
        assert {"out_of_memory"} < {finding.rule for finding in findings}
    for finding in findings:
        assert "failed" not in finding.title, finding.evidence
        for cause in finding.causes:
            keys = [change.key for change in cause.changes] + KEY.findall(cause.sentence)
            lacking = [key for key in keys if not history.has_key(key)]
            assert lacking == [], (finding.rule, cause.sentence)


def test_memory_is_freed_by_the_usual_key_of_a_plain_data_module() -> None:
    history = plain({"memory/peak_share": (lambda done: 0.99, 10)}, **{"machine.world_size": 1})
    history.config["trainer"]["accumulate_grad_batches"] = 2
    (finding,) = engine.diagnose(history)
    changes = []
    for cause in finding.causes:
        changes += [(change.key, change.to) for change in cause.changes]
    assert changes[:2] == [("data.batch_size", 4), ("trainer.accumulate_grad_batches", 4)]


def test_the_report_draws_what_was_logged_under_honest_titles() -> None:
    logged = {
        "train/loss": (falls, 10),
        "train_loss": (falls, 10),
        "val_loss": (falls, 40),
        "train_acc": (lambda done: done, 10),
        "val_acc": (lambda done: done, 40),
        "my metric/Größe <b>": (lambda done: done, 10),
        "always nan": (lambda done: math.nan, 10),
        "lr-Adam": (lambda done: 0.1, 10),
    }
    history = plain(logged)
    panels = curves.panels([history])
    assert panels["Loss"] == ("train/loss", "eval/loss", "train_loss", "val_loss")
    assert panels["acc"] == ("train_acc", "val_acc")
    assert not any("nats" in title for title in panels)
    drawn = curves.figures([history], ["a/b"])
    assert [trace["name"] for trace in drawn["Loss"]] == ["train/loss", "train_loss", "val_loss"]
    assert "my metric/Größe <b>" in drawn and "always nan" not in drawn and "lr-Adam" not in drawn
    html = page.page([history], [engine.diagnose(history)], "x.js")
    assert "my metric/Größe &lt;b&gt;" in html
    results = dict(tables.tables([history], ["a/b"])[0].rows)
    assert results["val_acc"] == "1" and "val_loss, lowest" in results
    text = histories.a_run()
    assert "Loss, nats per token" in curves.panels([text])


def test_two_runs_are_compared_at_equal_samples() -> None:
    one = plain({"train/samples": (lambda done: 800 * done, 10), "val_loss": (falls, 40)})
    other = plain({"train/samples": (lambda done: 400 * done, 10), "val_loss": (falls, 40)})
    made = tables.tables([one, other], ["a", "b"])
    table = next(table for table in made if "length" in table.title)
    assert table.title.startswith("At 400 samples")
    (row,) = [row for row in table.rows if row[0] == "val_loss"]
    assert row == ["val_loss", f"{falls(0.5):.5g}", f"{falls(1.0):.5g}"]


def test_two_hundred_metrics_make_a_page_that_can_be_read() -> None:
    logged = {f"class_{number}_iou": (lambda done: done, 40) for number in range(200)}
    history = plain(logged)
    assert len(curves.figures([history], ["a"])) == curves.MOST_PANELS
    results = dict(tables.tables([history], ["a"])[0].rows)
    assert results["further metrics"].startswith(f"{200 - tables.MOST_RESULTS}, in")


def test_a_run_that_logs_nothing_has_a_page() -> None:
    history = plain({})
    assert curves.figures([history], ["a"]) == {} and rules(history) == []
    assert "No metric was written" in page.page([history], [[]], "x.js")
