"""Every strategy trains to the same numbers as one process.

Each training runs once, on CPU processes, and several tests read its record. Labels are masked unevenly over rows, so
that a loss averaged per rank or per micro-batch would be detected.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.library import read_full
from tests.support.parity import CLIP, PROCESSES, SHORT, STEPS, PauseAfter, Trainings, assert_close
from tests.support.runs import newest
from tests.support.tiers import tiers

FOR_EXPERTS = {"fsdp2_ep", "fsdp2_tp_ep", "pp_ep"}
SHARDING = ["ddp", "fsdp2", "tp", "fsdp2_ep", "zero2", "zero3"]  # one of each kind
COMBINED = {
    "zero2_offload",
    "zero3_offload",
    "fsdp2_tp_ep",
}  # of strategies that are trained by themselves too
DAILY = [strategy for strategy in PROCESSES if strategy not in COMBINED]
CASES = tiers(
    [*(("deepseek_v3", strategy) for strategy in PROCESSES),
        *(("llama", strategy) for strategy in PROCESSES if strategy not in FOR_EXPERTS)],
    daily=[("deepseek_v3", strategy) for strategy in DAILY],
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy"), CASES)
def test_a_strategy_trains_to_the_numbers_of_one_process(
    train: Trainings, model: str, strategy: str
) -> None:
    one, many = train(model, "one"), train(model, strategy)
    assert sum(norm > CLIP for norm in one.grad_norm.values()) >= 6, (
        "gradients must have been clipped"
    )
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
    samples = [
        {step: sorted(row for row, _ in rows) for step, rows in run.rows().items()}
        for run in (one, many)
    ]
    assert samples[0] == samples[1], "every global batch has the same samples"


@pytest.mark.slow
def test_accumulation_equals_one_big_batch(train: Trainings) -> None:
    big, small = (
        train("deepseek_v3", "one", accumulation=1),
        train("deepseek_v3", "one", accumulation=8),
    )
    assert small.loss == pytest.approx(big.loss, rel=1e-5)
    assert small.grad_norm == pytest.approx(big.grad_norm, rel=1e-4)
    assert_close(small.end, big.end, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_legs", tiers([5, STEPS // 2], daily=[5]))
def test_a_training_continues_from_strategy_to_strategy(train: Trainings, num_legs: int) -> None:
    """Weights, moments, schedule and samples: each leg has the losses of an uninterrupted training."""
    expected = train("deepseek_v3", "one").loss
    legs = ["ddp", "fsdp2", "zero2", "tp", "zero3", "one"]
    checkpoint: list[str] = []
    for number, strategy in enumerate(legs[:num_legs]):
        leg = train.run(
            "fit", "deepseek_v3", strategy, *checkpoint, callbacks=[PauseAfter(2 * number + 2)]
        )
        assert leg.loss == pytest.approx(
            {s: expected[s] for s in (2 * number + 1, 2 * number + 2)}, rel=1e-5
        ), strategy
        checkpoint = [f"--ckpt_path={newest(leg.run)}"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(PROCESSES, daily=["fsdp2_ep", "zero3"]))
def test_a_checkpoint_is_tested_and_predicted_from(train: Trainings, strategy: str) -> None:
    checkpoint = newest(train("deepseek_v3", strategy).run)
    tested = train.test("deepseek_v3", strategy)
    assert tested == pytest.approx(train.test("deepseek_v3", "one"), rel=1e-5)
    train.run(
        "predict", "deepseek_v3", strategy, f"--ckpt_path={checkpoint}", "--data.prompts=[the]"
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(SHARDING, daily=["fsdp2_ep", "zero3"]))
def test_a_checkpoint_is_exported(train: Trainings, strategy: str, tmp_path: Path) -> None:
    checkpoint = newest(train("deepseek_v3", strategy).run)
    exported = tmp_path / "exported"
    train.run(
        "export", "deepseek_v3", strategy, f"--checkpoint={checkpoint}", f"--output={exported}"
    )
    weights = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).state_dict()
    for name, tensor in train("deepseek_v3", strategy).end.items():
        assert torch.equal(weights[name.removeprefix("model.")], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["fsdp2_ep", "hsdp"], daily=["hsdp"]))
def test_reducing_gradients_once_changes_no_number(train: Trainings, strategy: str) -> None:
    once = train(
        "deepseek_v3", strategy, "--trainer.strategy.init_args.reduce_each_micro_batch=false", SHORT
    )
    plain = train("deepseek_v3", "one", SHORT)
    assert once.loss == pytest.approx(plain.loss, rel=1e-5)
    assert once.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "checkpointing"),
    tiers([*((strategy, "full") for strategy in SHARDING), *((name, "selective") for name in (
        "fsdp2", "tp", "zero2"))], daily=[("fsdp2", "full"), ("zero2", "selective")]),
)  # fmt: skip
def test_activation_checkpointing_changes_no_number(
    train: Trainings, strategy: str, checkpointing: str
) -> None:
    flags = [
        f"--model.blocks.checkpointing={checkpointing}", "--model.blocks.checkpoint_every=2", SHORT,
    ]  # fmt: skip
    plain = train("deepseek_v3", "one", SHORT)
    assert train("deepseek_v3", strategy, *flags).loss == pytest.approx(plain.loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strategy"),
    tiers([("llama", "one"), ("llama", "fsdp2_tp"), ("llama", "tp"), ("llama", "zero3"), (
        "deepseek_v3", "fsdp2")], daily=[("llama", "tp"), ("llama", "zero3")]),
)  # fmt: skip
def test_the_loss_in_chunks_changes_no_number(train: Trainings, model: str, strategy: str) -> None:
    """2 or 4 rows of 32 tokens in chunks of 24, the last one smaller.

    Llama's output layer is tied to the embeddings, in FSDP2's root group; DeepSeek-V3's is in a group with the norm.
    """
    plain, chunked = (
        train(model, "one", SHORT),
        train(model, strategy, "--model.loss_chunk=24", SHORT),
    )
    assert chunked.loss == pytest.approx(plain.loss, rel=1e-5)
    assert chunked.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
    assert_close(chunked.end, plain.end, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["one", *SHARDING], daily=["fsdp2"]))
def test_bf16_mixed_stays_within_the_rounding_of_bf16(train: Trainings, strategy: str) -> None:
    exact = train("deepseek_v3", "one")
    rounded = train("deepseek_v3", strategy, "--trainer.precision=bf16-mixed")
    assert rounded.loss == pytest.approx(
        exact.loss, rel=2e-2
    )  # bf16 keeps 8 bits: 2**-8 = 0.4 % each operation
    kept = read_full(newest(rounded.run))["state_dict"]
    assert all(tensor.dtype == torch.float32 for tensor in kept.values()), (
        "weights are kept in float32"
    )
