"""The numerics guard under every strategy: a non-finite step changes no weight, and is reported."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest

from tests.support.library import read_incidents
from tests.support.numerics import (
    STRATEGIES,
    Train,
    is_finite,
    newest_step,
    spoil_gradient,
    spoil_loss,
    spoil_reduced_gradient,
)
from tests.support.parity import PROCESSES, assert_close
from tests.support.tiers import tiers
from tests.support.wings import RunRecord

BAD_STEP = 5
SKIPPED = [BAD_STEP, "non_finite", "skip"]


def assert_replicas_are_equal(run: RunRecord) -> None:
    """Ranks that hold the same part of a tensor hold the same."""
    for name in run.end:
        parts = [run.events("step", rank)[-1]["tensors"].get(name) for rank in range(run.size)]
        held = {tuple(part) for part in parts if part}
        assert len(held) == len({place for place, _ in held}), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(STRATEGIES, daily=["fsdp2_ep", "zero3"]))
def test_a_step_with_nan_on_one_rank_is_skipped_and_recorded(guarded: Train, strategy: str) -> None:
    spoil = partial(spoil_loss, BAD_STEP, rank=1, micro_batch=0)
    run = guarded(strategy, "skip", spoil, "--numerics.on_non_finite=skip").check()
    (incident,) = read_incidents(run.run)
    assert [incident[key] for key in ("step", "kind", "decision")] == SKIPPED
    assert incident["suspects"] == [1]
    assert [math.isnan(rank["loss"]) for rank in incident["ranks"]] == [False, True]
    rows = [[len(micro) for micro in rank["rows"]] for rank in incident["ranks"]]
    assert rows == [[2, 2]] * 2
    assert is_finite(run.end)
    assert f"step {BAD_STEP} was skipped: loss nan" in run.log(0)
    assert "from rank 1" in run.log(0)
    assert_replicas_are_equal(run)
    is_zero = strategy.startswith("zero")
    expected = guarded.by_hand("ddp" if is_zero else strategy, BAD_STEP)
    assert_close(run.end, expected, 1e-5 if is_zero else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(STRATEGIES, daily=["zero2"]))
def test_an_infinite_gradient_of_a_finite_loss_stops_all(guarded: Train, strategy: str) -> None:
    run = guarded(strategy, "stop", partial(spoil_gradient, BAD_STEP, rank=0))
    assert len(run.answers) == PROCESSES[strategy]
    for answer in run.answers.values():
        assert answer.startswith(f"Ended: training stopped: step {BAD_STEP} was skipped")
        assert "exit code 65" in answer
    (incident,) = read_incidents(guarded.run_folder(strategy, "stop"))
    assert math.isfinite(incident["loss"]) and not math.isfinite(incident["gradient_norm"])
    assert incident["suspects"] == []
    assert newest_step(guarded.run_folder(strategy, "stop")) < BAD_STEP


DAMAGED = [("ddp", math.nan), ("tp", math.inf), ("hsdp", math.nan)]
DAMAGED += [("fsdp2", math.inf), ("fsdp2_offload", math.nan), ("pp", math.nan), ("cp", math.inf)]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "value"), tiers(DAMAGED, daily=DAMAGED[:2]))
def test_all_ranks_skip_a_step_whose_reduced_gradient_is_damaged_on_one(
    guarded: Train, strategy: str, value: float
) -> None:
    """A corrupted kernel, or a user's hook: the other ranks' loss and norm are finite."""
    spoil = partial(spoil_reduced_gradient, BAD_STEP, rank=1, value=value)
    run = guarded(strategy, "damaged", spoil, "--numerics.on_non_finite=skip").check()
    (incident,) = read_incidents(run.run)
    assert [incident[key] for key in ("step", "kind", "decision")] == SKIPPED
    assert math.isfinite(incident["loss"])
    if strategy in ("ddp", "tp"):  # elsewhere the norm is joint
        assert incident["suspects"] == [1] and "from rank 1" in run.log(0)
    assert_replicas_are_equal(run)
    assert_close(run.end, guarded.by_hand(strategy, BAD_STEP), 0.0)


SPIKES = ["--numerics.spike_window=8", "--numerics.spike_sigmas=6"]  # it looks from the 5th step on
SPIKE_STEP = 7


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["ddp", "zero3"], daily=["zero3"]))
def test_a_spike_is_skipped_and_recorded(guarded: Train, strategy: str) -> None:
    spoil = partial(spoil_loss, SPIKE_STEP, rank=1, micro_batch=1, factor=50.0)
    run = guarded(strategy, "spike", spoil, "--numerics.on_spike=skip", *SPIKES).check()
    (incident,) = read_incidents(run.run)
    assert (incident["step"], incident["kind"], incident["suspects"]) == (SPIKE_STEP, "spike", [1])
    assert incident["loss"] > incident["limit"] > 0
    assert_close(run.end, guarded.by_hand("ddp", SPIKE_STEP), 0.0 if strategy == "ddp" else 1e-5)


BF16 = "--trainer.precision=bf16-mixed"
ADDS_IN_FP32 = (
    '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true},'
    ' "data_types": {"grad_accum_dtype": "fp32"}}'
)
OTHERS = [("zero2_offload", "", "non_finite"), ("zero1", ADDS_IN_FP32, "spike")]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "config", "fault"), OTHERS)
def test_deepspeeds_other_optimizers_skip_exactly_one_step(
    guarded: Train, strategy: str, config: str, fault: str, tmp_path: Path
) -> None:
    (tmp_path / "deepspeed.json").write_text(config)
    flags = [BF16, "--numerics.on_spike=skip", "--numerics.on_non_finite=skip", *SPIKES]
    flags += [f"--trainer.strategy.init_args.config={tmp_path}/deepspeed.json"] if config else []
    loss = partial(spoil_loss, SPIKE_STEP, rank=1, micro_batch=1, factor=50.0)
    plant = loss if fault == "spike" else partial(spoil_gradient, SPIKE_STEP, 0)
    run = guarded(strategy, f"{fault}-bf16", plant, *flags)
    (incident,) = read_incidents(run.check().run)
    assert (incident["step"], incident["kind"]) == (SPIKE_STEP, fault)
    for name, weight in guarded.by_hand("ddp", SPIKE_STEP).items():
        difference = run.end[name].float() - weight
        assert difference.norm() < 0.03 * weight.norm(), f"{name}: bf16 makes 0.01, that step 0.08"
