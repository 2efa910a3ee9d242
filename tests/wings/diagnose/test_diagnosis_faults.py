"""A planted fault is diagnosed with the right cause first, and no healthy training is called wrong.

The histories are recorded (recorded.py). Slow: trainings with the advised change; nightly: all."""

import json
import math
import shlex
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_template.parallel.spec.facts import STATE
from dist_template.wings.diagnose import Change, Finding, History, engine, read_run
from dist_template.wings.diagnose.finding import as_text
from dist_template.wings.diagnose.memory import figures_of
from dist_template.wings.diagnose.remedies import memory_use, remedies
from tests.support.fault_runs import ALL, FAULTS, Training, Trainings
from tests.support.histories import a_run, assert_followed_advice_is_not_given, loss, nested, noisy
from tests.support.memory import Allocated, State
from tests.support.parity import PROCESSES
from tests.support.recorded import recorded
from tests.support.runs import Workers, run
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

each_of, ids = pytest.mark.parametrize, attrgetter("name")
# The faults that are a key's, and cured in seconds. A fault in the code remains.
CURABLE = """learning_rate_x100 learning_rate_x0.001 router_collapse dead_expert
    router_collapse_by_weights expensive_checkpoints overfitting""".split()
DAILY = [fault for fault in FAULTS if fault.name == "learning_rate_x100"]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("faults"))


def is_named(training: Training, findings: list[Finding]) -> bool:
    """Whether the first finding is the expected one, with the expected cause first."""
    if not findings:
        return False
    first = findings[0]
    if first.rule != training.rule or first.level == "info":
        return False
    text, keys = f"{first.title} {first.evidence}", list[str]()
    if first.causes:
        cause = first.causes[0]
        text += f" {cause.sentence}"
        keys = [change.key for change in cause.changes]
    if training.key and keys[:1] != [training.key]:
        return False
    return training.says in text


def check(training: Training, findings: list[Finding]) -> None:
    text = as_text(findings) or "nothing was found"
    if training.rule:
        assert is_named(training, findings), text
        first = findings[0]
        assert first.causes or first.rule == "crashed", text
        changes = [change for cause in first.causes for change in cause.changes]
        assert any(letter.isdigit() for letter in first.evidence), text
        assert all(change.to is not None and change.to != change.now for change in changes), text
    else:
        assert not [finding for finding in findings if finding.level == "error"], text
        assert not any(is_named(fault, findings) for fault in FAULTS), text


@each_of("training", ALL, ids=ids)
def test_a_recorded_training_is_diagnosed_as_expected(training: Training) -> None:
    check(training, engine.diagnose(recorded(training.name)))


def test_every_rule_has_a_planted_fault() -> None:
    assert set(engine.RULES) == {fault.rule for fault in FAULTS}


@pytest.mark.slow
@each_of("training", tiers([each for each in FAULTS if each.name in CURABLE], daily=DAILY), ids=ids)
def test_the_advised_change_cures_the_fault(trainings: Trainings, training: Training) -> None:
    first = engine.diagnose(recorded(training.name))[0]
    advice = ["=".join(shlex.split(change.flag)) for change in first.causes[0].changes]
    cured = replace(training, name=f"{training.name}_cured", flags=[*training.flags, *advice])
    findings = engine.diagnose(read_run(trainings(cured)))
    assert trainings.records[cured.name].ok, trainings.records[cured.name].error
    rules = [finding.rule for finding in findings]
    assert training.rule not in rules, f"{advice}\n{as_text(findings)}"


@pytest.mark.nightly
@each_of("training", ALL, ids=ids)
def test_a_live_training_is_diagnosed_as_expected(trainings: Trainings, training: Training) -> None:
    check(training, engine.diagnose(read_run(trainings(training))))


RATE, LOSS, CHECKPOINT = "model.optim.learning_rate", "train/loss", "last_checkpoint.every_n_steps"
CPU = {"machine.device": "cpu", "machine.supports_bf16": False}
FP32 = {"trainer.precision": "32-true"}


def incident(step: int, rank: int = 0, decision: str = "stop", **more: Any) -> dict[str, Any]:
    entry = {"step": step, "kind": "non_finite", "decision": decision, "loss": math.nan}
    entry["suspects"] = [rank]
    entry["ranks"] = [{"rank": number, "loss": 2.0, "rows": [[number]]} for number in range(8)]
    return entry | more


def column(name: str, values: Any) -> dict[str, Any]:
    return {"columns": {name: values}}


def diverges_at_the_end(done: Any) -> Any:
    return loss(done) + 0.3 * np.maximum(done - 0.7, 0)


def jumps_early(done: Any) -> Any:
    return loss(done) + 0.5 * ((done > 0.0025) & (done < 0.02))


def grows_early(done: Any) -> Any:
    """Memory of an allocator that grows in the first quarter, and by single pages after it."""
    return 40 + 10 * np.minimum(done / 0.25, 1) + 0.01 * done


def waits_after_validations(done: Any) -> Any:
    return np.where(done * 10 % 1 < 0.01, 0.6, 0.02)


SAVES = {"productive": 5000.0, "checkpoint": 400.0}
# What comes close to a rule's fault in a healthy run of a large model.
NEAR_MISSES: dict[str, dict[str, Any]] = {
    "loss_not_finite": {"incidents": [incident(500, loss=9.0, kind="spike", decision="skip")]},
    "loss_diverges": column(LOSS, diverges_at_the_end),
    "early_loss_jump": {"every": 5} | column(LOSS, jumps_early),
    "loss_spikes": column(LOSS, lambda done: noisy(loss(done), 0.03)),
    # fine-tuning: the first loss is low
    "loss_not_decreasing": column(LOSS, lambda done: noisy(np.full_like(done, 3.0), 0.002)),
    "loss_oscillates": column(LOSS, lambda done: noisy(loss(done), 0.05)),
    "labels_masked": column(LOSS, 0.2),
    "memory_nearly_full": column("memory/peak_share", 0.94),
    "experts_unused": column("moe/unused_experts", 3.0),
    "experts_overloaded": column("moe/expert_load_max_over_mean", 2.5),  # at most 4
    "memory_grows": column("memory/allocated_gib", grows_early),
    "waits_for_data": column("perf/data_wait_share", waits_after_validations),
    "slow_rank": column("rank/slowest_over_median", 1.8),  # another rank each time
    "fp32_on_gpu": {"config": FP32, "facts": CPU},
    "checkpoint_overhead_high": {"config": {CHECKPOINT: 10}, "goodput": SAVES},
    "validation_overhead_high": {"goodput": {"productive": 5000.0, "validation": 400.0}},
}


def found(**changes: Any) -> dict[str, Finding]:
    return {finding.rule: finding for finding in engine.diagnose(a_run(**changes))}


@each_of("rule", NEAR_MISSES)
def test_a_rule_does_not_find_the_near_miss(rule: str) -> None:
    assert rule not in found(**NEAR_MISSES[rule])


def diverging(noise: float, rise: float, validated: float) -> float:
    """Returns the share of fine-tunings of ten steps, two rows each, that are called diverging."""

    def training_loss(factors: Any, done: Any) -> Any:
        return 2 * factors + rise * np.maximum(done - 0.4, 0)

    def validation_loss(done: Any) -> Any:
        return 2 + validated * done

    num_called = 0
    for seed in range(100):
        factors = np.exp(noise * np.random.default_rng(seed).standard_normal(10))
        columns: Any = {LOSS: partial(training_loss, factors), "eval/loss": validation_loss}
        if "loss_diverges" in found(steps=10, every=1, columns=columns):
            num_called += 1
    return num_called / 100


def test_noise_of_ten_steps_is_no_divergence_and_a_true_one_is_found() -> None:
    assert diverging(noise=0.2, rise=0.0, validated=0.0) <= 0.01
    assert diverging(noise=0.5, rise=0.0, validated=-0.1) == 0, "validations improve"
    assert diverging(noise=0.1, rise=5.0, validated=1.0) >= 0.95
    assert diverging(noise=0.1, rise=20.0, validated=1.0) == 1


def test_a_divergence_that_has_nearly_come_down_is_not_called_an_oscillation() -> None:
    """As when a schedule's rate jumps and then decays: from 2.6 to 200, and back to 3."""

    def jumps(done: np.ndarray) -> np.ndarray:
        after = np.maximum(done - 0.52, 0.0)
        return loss(done) + (done > 0.52) * noisy(0.7 + 200 * np.exp(-after / 0.1), 0.3)

    rules = found(steps=100, every=2, columns={"train/loss": jumps, "eval/loss": jumps}).keys()
    assert "loss_diverges" in rules and "loss_oscillates" not in rules


SIZES = [(20, 1, 1.0), (100, 10, 1.0), (10_000, 25, 1.0), (100_000, 50, 1.0)]
SIZES += [(100_000, 10, upto) for upto in (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9)]


@each_of(("steps", "every", "upto"), SIZES)
def test_a_healthy_run_has_no_findings(steps: int, every: int, upto: float, tmp_path: Path) -> None:
    assert [f.line for f in engine.diagnose(a_run(steps, every, upto=upto))] == []
    assert engine.diagnose(History(tmp_path)) == [], "nor one that has written nothing"


def test_a_rule_that_raises_becomes_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(history: History) -> Any:
        raise KeyError("train/lsos")
        yield

    monkeypatch.setitem(engine.RULES, "broken", broken)
    (finding,) = engine.diagnose(a_run(20, 1))
    assert finding.level == "info" and "KeyError" in finding.evidence


def test_lines_that_wait_are_a_cause_of_waiting() -> None:
    columns: dict[str, Any] = {"perf/data_wait_share": 0.2}
    facts = {"training": {"waits": ["module.py:3 reads a value"]}}
    finding = found(columns=columns, facts=facts)["waits_for_data"]
    assert "module.py:3" in finding.causes[-1].sentence


def test_findings_are_sorted_and_consequences_are_dropped() -> None:
    columns: dict[str, Any] = {LOSS: 0.0, "perf/data_wait_share": 0.2}
    findings = engine.diagnose(a_run(columns=columns, config=FP32))
    rules = [each.rule for each in findings]
    assert rules == ["labels_masked", "fp32_on_gpu", "waits_for_data"]
    text = as_text(findings)
    assert max(map(len, text.splitlines())) <= 130
    assert text.startswith(findings[0].level.upper()) and "--" in text
    assert all(each.title in text for each in findings)


def test_proposed_values_and_named_machines_are_right() -> None:
    goodput = {"productive": 5000.0, "checkpoint": 2000.0}
    often = found(config={CHECKPOINT: 10}, goodput=goodput)["checkpoint_overhead_high"]
    changes = {change.key: change.to for cause in often.causes for change in cause.changes}
    assert changes[CHECKPOINT] == 80, "1,000 saves of 2 s, a step of 0.5 s"
    slow = found(columns={"rank/slowest": 5.0, "rank/slowest_over_median": 1.8})["slow_rank"]
    assert slow.ranks == [5] and "node2" in slow.title


def test_the_likelier_cause_of_nan_comes_first() -> None:
    bad = {"what": "output", "module": "model.layers.3.mlp", "ranks": [0]}
    first, rule = [incident(500, first_bad=bad)], "loss_not_finite"
    stable = found(incidents=first)[rule]
    assert "model.layers.3.mlp" in stable.causes[0].sentence and stable.ranks == [0]
    unstable = found(incidents=first, config={RATE: 0.5})[rule]
    assert unstable.causes[0].changes[0].key == RATE
    for what in ("weight", "data", "buffer", "gradient"):
        of_rank = {"what": what, "module": "model.x", "ranks": [2]}
        named = found(incidents=[incident(500, first_bad=of_rank)])[rule]
        assert "model.x" in named.causes[0].sentence and "on rank 2" in named.evidence
    repeated = [incident(step, rank=3, decision="skip") for step in (500, 900)]
    assert "rank 3" in found(incidents=repeated)[rule].causes[0].sentence


RECORDED = [each for each in ALL if recorded(each.name).config]
MADE: dict[str, dict[str, Any]] = {
    "skipped": {"incidents": [incident(500, decision="skip")]},
    "spikes": column(LOSS, lambda done: loss(done) + 2 * (np.arange(len(done)) % 37 == 36)),
    "slow disk": column("perf/data_wait_share", 0.2),
    "memorized": {
        "columns": {
            LOSS: lambda done: 0.05 + 2.95 * np.exp(-done / 0.15),
            "eval/loss": lambda done: 2 + 1.6 * done,
        }
    },
}


@each_of("name", [*(each.name for each in RECORDED), *MADE])
def test_no_advice_is_a_setting_that_the_run_has(name: str) -> None:
    """Each advice of each fault is followed, and the same metrics are diagnosed again."""
    history = a_run(**MADE[name]) if name in MADE else recorded(name)
    findings = engine.diagnose(history)
    if name in MADE:
        assert any(cause.changes for finding in findings for cause in finding.causes)
    assert_followed_advice_is_not_given(history, findings)


def test_samples_that_are_skipped_already_are_to_be_inspected() -> None:
    config = {"numerics.on_non_finite": "skip", "numerics.on_spike": "skip"}
    made = {**MADE["skipped"], "config": config}
    sentence = found(**made)["loss_not_finite"].causes[-1].sentence
    assert "inspect their rows (incidents.jsonl); such steps are skipped" in sentence


def test_a_rate_of_0_in_the_first_step_is_no_advice() -> None:
    """A linear warm-up starts at 0, and the loss may jump in the second log step."""

    def jumps(done: np.ndarray) -> np.ndarray:
        return loss(done) + 30 * ((done > 0.003) & (done < 0.1))

    def rate(done: np.ndarray) -> np.ndarray:
        return 6e-4 * np.maximum(done - 0.0025, 0)

    config = {RATE: 0.0, "model.optim.warmup": 0.5}
    columns: Any = {LOSS: jumps, "train/learning_rate": rate}
    rates: list[Any] = []
    for finding in engine.diagnose(a_run(10_000, 25, columns=columns, config=config)):
        for cause in finding.causes:
            rates += [change.to for change in cause.changes if change.key == RATE]
    assert rates and min(rates) > 0


WIDTH, LAYERS, MLP, VOCAB = 256, 4, 512, 257
ARCHITECTURE = (
    f"--model.architecture={{model_type: llama, hidden_size: {WIDTH}, intermediate_size: {MLP},"
    f" num_hidden_layers: {LAYERS}, num_attention_heads: 4, num_key_value_heads: 4}}"
)
PARAMETERS = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * MLP + 2 * WIDTH) + 2 * VOCAB * WIDTH + WIDTH
ADAPTED = sum(8 * (WIDTH + out) for out in (WIDTH,) * 4 + (MLP,) * 3) * LAYERS
LLAMA_7B = 6_738_415_616
FACTS: dict[str, Any] = {"parameters.total": LLAMA_7B, "parameters.embedding": 131_072_000}
FACTS |= {"model.layers": 32, "model.width": 4096, "model.heads": 32, "model.vocab_size": 32000}
FACTS |= {"machine.device": "NVIDIA H100", "machine.supports_bf16": True}
COUNTED = {"data.seq_len": 4096, "data.micro_batch_size": 8, "data.global_batch_size": 64}
CONFIG: dict[str, Any] = COUNTED | {"trainer.precision": "bf16-mixed"}
CONFIG["model.architecture"] = {"intermediate_size": 11008}
LORA = "--model.adapter.rank=8"
FOUR_BITS = f"{LORA} --model.adapter.quantize=nf4"
PIPELINE = "--data.global_batch_size=16 --data.micro_batch_size=1"
INTERLEAVED = f"{PIPELINE} --trainer.strategy.init_args.pp_schedule=Interleaved1F1B"
# strategy, precision, flags; without adapters, tests/wings/test_plan.py has more of them
TRAINED = [("fsdp2", "32-true", FOUR_BITS), ("pp", "32-true", PIPELINE)]
TRAINED += [("fsdp2", "bf16-true", ""), ("zero3", "bf16-mixed", ""), ("zero3", "32-true", LORA)]
TRAINED += [("ddp", "32-true", LORA), ("zero3", "32-true", FOUR_BITS), ("cp", "32-true", PIPELINE)]
TRAINED += [("pp_fsdp2", "32-true", PIPELINE), ("pp", "32-true", INTERLEAVED)]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "precision", "more"), tiers(TRAINED, TRAINED[:2]))
def test_the_estimate_of_a_runs_memory_is_that_of_its_training(
    flags: Any, tmp_path: Path, strategy: str, precision: str, more: str
) -> None:
    """State within 2 %, in pipelines 5 %; activations within a factor of two."""
    ranks, is_staged = PROCESSES[strategy], PIPELINE in more
    run("prepare", *flags)
    given = [*flags, *flags_of(strategy), *more.split(), ARCHITECTURE, "--data.seq_len=64"]
    given += [f"--trainer.precision={precision}", f"--trainer.devices={ranks}"]
    given += ["--trainer.max_steps=3", "--trainer.limit_val_batches=0"]
    callbacks: list[Any] = [State(tmp_path)]
    if not is_staged:
        callbacks.append(Allocated(tmp_path))
    record = Workers(ranks).run(["fit", *given], tmp_path / "record", callbacks=callbacks).check()
    spec, facts = figures_of(read_run(record.run))
    parts = spec.memory(facts)
    measured = [json.loads(file.read_text()) for file in tmp_path.glob("state[0-9].json")]
    counted = [sum(parts[part] for part in STATE)] * ranks
    if is_staged:
        assert counted[0] == pytest.approx(max(measured), rel=0.05)
        assert ("unsharded gradients" in parts) == (ranks > 2)
        return
    if LORA in more:
        assert (facts.parameters, facts.trainable) == (PARAMETERS + ADAPTED, ADAPTED)
    else:
        assert facts.parameters == facts.trainable == PARAMETERS
    assert measured == pytest.approx(counted, rel=0.02), parts
    allocated = json.loads((tmp_path / "allocated0.json").read_text())
    ratio = allocated / (parts["activations"] + max(parts["logits"], parts["backward"]))
    assert 0.5 < ratio < 2.0, "UNDERCOUNTED in remedies.py is 1.6"


def llama_7b(strategy: dict[str, Any] | str = "ddp", world_size: int = 8, **keys: Any) -> History:
    """A run on GPUs; `keys` with "__" for dots."""
    config = CONFIG | {"trainer.strategy": strategy}
    config |= {key.replace("__", "."): value for key, value in keys.items()}
    facts = FACTS | {"machine.world_size": world_size}
    return History(Path("run"), config=nested(config), facts=nested(facts))


def a_strategy(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"{name}Strategy", "init_args": arguments}


def changes(history: History, memory: Any = None, **options: Any) -> dict[str, Change]:
    causes = remedies(memory_use(history, memory or {}, **options))
    return {change.key: change for cause in causes for change in cause.changes}


BATCH = "data.micro_batch_size"


def test_the_proposed_micro_batch_divides_and_fits() -> None:
    history = llama_7b(a_strategy("Mesh"), data__micro_batch_size=12)
    memory = {"used_gib": 79.0, "total_gib": 80.0, "asked_gib": 2.0}
    change = changes(history, memory, phase="backward")[BATCH]
    # 79 - 12.6 of state - 1.5 gathered + 2 requested = 67 grow with it; 5 must go: 6/12 of 67
    assert (change.now, change.to) == (12, 6) and change.note.endswith(", enough by itself")
    freed_gib = float(change.note.split()[1])
    assert freed_gib == pytest.approx(33.5, abs=1.5)
    assert changes(history, memory | {"used_gib": 79.9, "asked_gib": 60.0})[BATCH].to == 4


def test_remedies_in_effect_or_impossible_are_not_proposed() -> None:
    replicated = changes(llama_7b())
    assert {BATCH, "model.blocks.checkpointing", "config"} < replicated.keys()
    assert "trainer.precision" not in replicated
    assert "trainer.precision" in changes(llama_7b(trainer__precision="32-true"))
    small: Any = {"data__micro_batch_size": 1, "data__seq_len": 64, "data__global_batch_size": 1}
    slim = llama_7b(world_size=1, model__blocks__checkpointing="full", **small)
    slim.facts["machine"]["device"] = "cpu"
    assert changes(slim) == {}
    third = a_strategy("Zero", stage=3, offload_optimizer=True)
    replaced = changes(llama_7b(third, data__micro_batch_size=1))
    assert "trainer.strategy.init_args.stage" not in replaced
    fp16 = remedies(memory_use(llama_7b(trainer__precision="16-mixed"), {}))
    files = {change.to for cause in fp16 for change in cause.changes}
    assert "strategy/fsdp2" not in files, "limits/ refuses it"
