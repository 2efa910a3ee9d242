"""The numerics guard under every strategy: a non-finite step changes no weight, and is reported."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import numerics
from tests.support.library import read_incidents
from tests.support.numerics import Train, is_finite, newest_step
from tests.support.parity import PROCESSES, assert_close
from tests.support.tiers import tiers
from tests.support.wings import RunRecord

pytestmark = pytest.mark.slow
STRATEGIES = ["ddp", "fsdp2", "fsdp2_ep", "zero1", "zero2", "zero3"]
BAD_STEP = 7
SKIP = "--numerics.on_non_finite=skip"
SPIKES = ["--numerics.on_spike=skip", "--numerics.spike_window=8", "--numerics.spike_sigmas=6"]
SPIKE = partial(numerics.spoil_loss, [BAD_STEP], rank=1, micro_batch=1, factor=50.0)


def assert_replicas_are_equal(run: RunRecord) -> None:
    """Ranks that hold the same part of a tensor hold the same."""
    for name in run.end:
        parts = [run.events("step", rank)[-1]["tensors"].get(name) for rank in range(run.size)]
        held = {tuple(part) for part in parts if part}
        assert len(held) == len({place for place, _ in held}), name


def skipped(run: RunRecord, kind: str = "non_finite") -> dict[str, Any]:
    """The one incident of a training that completed; the bad step was skipped on all ranks."""
    (incident,) = read_incidents(run.check().run)
    found = [incident[key] for key in ("step", "kind", "decision")]
    assert found == [BAD_STEP, kind, "skip"]
    assert_replicas_are_equal(run)
    return incident


@pytest.mark.parametrize("strategy", tiers(STRATEGIES, daily=["fsdp2_ep", "zero3"]))
def test_a_step_with_nan_on_one_rank_is_skipped_and_recorded(guarded: Train, strategy: str) -> None:
    run = guarded(strategy, "skip", partial(numerics.spoil_loss, [BAD_STEP], rank=1), SKIP)
    incident = skipped(run)
    assert incident["suspects"] == [1]
    assert [math.isnan(rank["loss"]) for rank in incident["ranks"]] == [False, True]
    rows = [[len(micro) for micro in rank["rows"]] for rank in incident["ranks"]]
    assert rows == [[2, 2]] * 2
    assert is_finite(run.end)
    assert f"step {BAD_STEP} was skipped: loss nan" in run.log(0) and "from rank 1" in run.log(0)
    is_zero = strategy.startswith("zero")
    expected = guarded.by_hand("ddp" if is_zero else strategy, BAD_STEP)
    assert_close(run.end, expected, 1e-5 if is_zero else 0.0)


@pytest.mark.parametrize("strategy", tiers(STRATEGIES, daily=["zero2"]))
def test_an_infinite_gradient_of_a_finite_loss_stops_all(guarded: Train, strategy: str) -> None:
    run = guarded(strategy, "stop", partial(numerics.spoil_gradient, BAD_STEP, rank=0))
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


@pytest.mark.parametrize(("strategy", "value"), tiers(DAMAGED, daily=DAMAGED[:1]))
def test_all_ranks_skip_a_step_whose_reduced_gradient_is_damaged_on_one(
    guarded: Train, strategy: str, value: float
) -> None:
    """A corrupted kernel, or a user's hook: the other ranks' loss and norm are finite."""
    spoil = partial(numerics.spoil_reduced_gradient, BAD_STEP, rank=1, value=value)
    run = guarded(strategy, "damaged", spoil, SKIP)
    incident = skipped(run)
    assert math.isfinite(incident["loss"])
    if strategy in ("ddp", "tp"):  # elsewhere the norm is joint
        assert incident["suspects"] == [1] and "from rank 1" in run.log(0)
    assert_close(run.end, guarded.by_hand(strategy, BAD_STEP), 0.0)


BF16 = "--trainer.precision=bf16-mixed"
ADDS_IN_FP32: dict[str, Any] = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
ADDS_IN_FP32 |= {"data_types": {"grad_accum_dtype": "fp32"}}
OTHERS = [("zero1", json.dumps(ADDS_IN_FP32), "spike"), ("zero2_offload", "", "non_finite")]


@pytest.mark.parametrize(("strategy", "config", "fault"), tiers(OTHERS, daily=OTHERS[:1]))
def test_deepspeeds_other_optimizers_skip_exactly_one_step(
    guarded: Train, strategy: str, config: str, fault: str, tmp_path: Path
) -> None:
    (tmp_path / "deepspeed.json").write_text(config)
    flags = [BF16, SKIP, *SPIKES]
    flags += [f"--trainer.strategy.init_args.config={tmp_path}/deepspeed.json"] if config else []
    plant = SPIKE if fault == "spike" else partial(numerics.spoil_gradient, BAD_STEP, 0)
    run = guarded(strategy, f"{fault}-bf16", plant, *flags)
    incident = skipped(run, fault)
    if fault == "spike":
        assert incident["suspects"] == [1] and incident["loss"] > incident["limit"] > 0
    for name, weight in guarded.by_hand("ddp", BAD_STEP).items():
        difference = run.end[name].float() - weight
        assert difference.norm() < 0.03 * weight.norm(), f"{name}: bf16 makes 0.01, that step 0.08"
