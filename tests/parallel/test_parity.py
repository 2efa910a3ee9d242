"""Every strategy trains to the same numbers as one process.

Each training runs once, on CPU processes, and several tests read its record. Labels are masked
unevenly over rows, so that a loss averaged per rank or per micro-batch would be detected.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.library import read_full
from tests.support.parity import CLIP, PROCESSES, SHORT, STEPS, PauseAfter, Trainings, assert_close
from tests.support.runs import newest
from tests.support.strategies import ARGS
from tests.support.tiers import tiers

FOR_EXPERTS = {"fsdp2_ep", "fsdp2_tp_ep", "pp_ep"}
SHARDING = ["ddp", "fsdp2", "tp", "fsdp2_ep", "zero2", "zero3"]  # one of each kind
COMBINED = {"zero2_offload", "zero3_offload", "fsdp2_tp_ep"}  # of strategies that are here too
DAILY = [strategy for strategy in PROCESSES if strategy not in COMBINED]
CASES = [("deepseek_v3", strategy) for strategy in PROCESSES]
CASES += [("llama", strategy) for strategy in PROCESSES if strategy not in FOR_EXPERTS]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy"), tiers(CASES, [("deepseek_v3", s) for s in DAILY]))
def test_a_strategy_trains_to_the_numbers_of_one_process(
    train: Trainings, model: str, strategy: str
) -> None:
    one, many = train(model, "one"), train(model, strategy)
    assert sum(norm > CLIP for norm in one.grad_norm.values()) >= 6, "gradients were clipped"
    assert list(one.loss) == list(range(1, STEPS + 1))
    for name, tensor in one.start.items():
        assert torch.equal(tensor, many.start[name]), f"{name}: initial weights are bit-identical"
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    rates, expected = (run.metric("train/learning_rate") for run in (many, one))
    assert rates == pytest.approx(expected, rel=1e-12)
    assert_close(many.end, one.end, 1e-5)
    assert list(one.eval()) == list(many.eval()) == [STEPS // 2, STEPS]
    for step, metrics in one.eval().items():
        assert many.eval()[step] == pytest.approx(metrics, rel=1e-5), "every sample once"
    expected, samples = (
        {step: {row for row, _ in rows} for step, rows in run.rows().items()} for run in (one, many)
    )
    assert samples == expected, "every global batch has the same samples"


@pytest.mark.slow
def test_accumulation_equals_one_big_batch(train: Trainings) -> None:
    big, small = (train("deepseek_v3", "one", accumulation=each) for each in (1, 8))
    assert small.loss == pytest.approx(big.loss, rel=1e-5)
    assert small.grad_norm == pytest.approx(big.grad_norm, rel=1e-4)
    assert_close(small.end, big.end, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_legs", tiers([5, STEPS // 2], daily=[5]))
def test_a_training_continues_from_strategy_to_strategy(train: Trainings, num_legs: int) -> None:
    """Weights, moments, schedule and samples: each leg has an uninterrupted training's losses."""
    expected = train("deepseek_v3", "one").loss
    legs = ["ddp", "fsdp2", "zero2", "tp", "zero3", "one"]
    checkpoint: list[str] = []
    for number, strategy in enumerate(legs[:num_legs]):
        steps = (2 * number + 1, 2 * number + 2)
        pause = PauseAfter(steps[1])
        leg = train.run("fit", "deepseek_v3", strategy, *checkpoint, callbacks=[pause])
        assert leg.loss == pytest.approx({s: expected[s] for s in steps}, rel=1e-5), strategy
        checkpoint = [f"--ckpt_path={newest(leg.run)}"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(PROCESSES, daily=["fsdp2_ep", "zero3"]))
def test_a_checkpoint_is_tested_predicted_from_and_exported(
    train: Trainings, strategy: str, tmp_path: Path
) -> None:
    checkpoint = newest(train("deepseek_v3", strategy).run)
    tested = train.test("deepseek_v3", strategy)
    assert tested == pytest.approx(train.test("deepseek_v3", "one"), rel=1e-5)
    prompt = [f"--ckpt_path={checkpoint}", "--data.prompts=[the]"]
    train.run("predict", "deepseek_v3", strategy, *prompt)
    exported = tmp_path / "exported"
    given = [f"--checkpoint={checkpoint}", f"--output={exported}"]
    train.run("export", "deepseek_v3", strategy, *given)
    weights = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).state_dict()
    for name, tensor in train("deepseek_v3", strategy).end.items():
        assert torch.equal(weights[name.removeprefix("model.")], tensor), name


BLOCKS = "--model.blocks."
FULL = [f"{BLOCKS}checkpointing=full", f"{BLOCKS}checkpoint_every=2"]
COMPILED = [f"{BLOCKS}compile=true", f"{BLOCKS}checkpointing=full"]
ONCE, CHUNKS = [f"{ARGS}.reduce_each_micro_batch=false"], ["--model.loss_chunk=24"]
IN_PART, MIXED = [f"{BLOCKS}checkpointing=selective"], ["--trainer.precision=bf16-mixed"]
OPTIONS = {  # model, flags, tolerance of the loss, strategies, those in `make test`
    "reduced once": ("deepseek_v3", ONCE, 1e-5, ["fsdp2_ep", "hsdp"], ["hsdp"]),
    "recomputed": ("deepseek_v3", FULL, 1e-5, SHARDING, ["fsdp2"]),
    "recomputed, llama": ("llama", FULL, 1e-6, ["cp"], []),
    "in part": ("deepseek_v3", IN_PART, 1e-5, ["fsdp2", "tp", "zero2"], ["zero2"]),
    "in part, llama": ("llama", IN_PART, 1e-6, ["cp"], ["cp"]),
    "compiled": ("llama", COMPILED, 1e-5, ["one", "fsdp2", "zero2", "cp"], ["zero2"]),
    # 2 or 4 rows of 32 tokens, the last chunk smaller; Llama's output layer is tied
    "chunks": ("llama", CHUNKS, 1e-5, ["one", "fsdp2_tp", "tp", "zero3", "cp"], ["tp", "zero3"]),
    "chunks, not tied": ("deepseek_v3", CHUNKS, 1e-5, ["fsdp2"], []),
    # bf16 keeps 8 bits: 2**-8 = 0.4 % each operation
    "bf16-mixed": ("deepseek_v3", MIXED, 2e-2, ["one", *SHARDING], ["fsdp2"]),
    "bf16-true": ("llama", ["--trainer.precision=bf16-true"], 5e-2, ["fsdp2", "zero3"], ["zero3"]),
}  # fmt: skip
WITH = [(name, strategy) for name, option in OPTIONS.items() for strategy in option[3]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "strategy"), tiers(WITH, [(name, s) for name, s in WITH if s in OPTIONS[name][4]])
)
def test_an_option_changes_no_number(train: Trainings, option: str, strategy: str) -> None:
    model, flags, tolerance, *_ = OPTIONS[option]
    plain, changed = train(model, "one", SHORT), train(model, strategy, *flags, SHORT)
    assert changed.loss == pytest.approx(plain.loss, rel=tolerance)
    if tolerance < 1e-4:
        assert changed.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
    if option == "bf16-mixed":
        kept = read_full(newest(changed.run))["state_dict"]
        assert {tensor.dtype for tensor in kept.values()} == {torch.float32}, "weights stay so"


@pytest.mark.slow
@pytest.mark.nightly  # in `make test`: fsdp2 on 2 and hsdp on 4, above
@pytest.mark.parametrize("processes", [1, 4])
def test_the_number_of_processes_does_not_matter(train: Trainings, processes: int) -> None:
    one, many = train("llama", "one"), train("llama", "fsdp2", processes=processes)
    assert many.loss == pytest.approx(one.loss, rel=1e-5)
    assert_close(many.end, one.end, 1e-5)
