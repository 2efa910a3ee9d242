"""The numerics guard: its reactions to anomalous steps, on one process and under every strategy."""

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_dev.module import LanguageModule

from dist_template import Ended
from dist_template.callbacks import Numerics
from dist_template.callbacks.numerics import StepCheck
from dist_template.errors import Exit
from tests.support.library import numerics, read_full, read_incidents
from tests.support.numerics import (
    Train,
    is_finite,
    newest_step,
    spoil_gradient,
    spoil_loss,
    spoil_reduced_gradient,
)
from tests.support.parity import PROCESSES, assert_close
from tests.support.runs import newest, only_run, run
from tests.support.tiers import tiers
from tests.support.wings import RunRecord

QUICK = ["--trainer.max_steps=8", "--trainer.limit_val_batches=0", "--trainer.logger=false"]
QUICK += ["--model.optim.warmup=2"]


def saved_weights(root: Path, name: str = "default") -> dict[str, Tensor]:
    return read_full(newest(only_run(root, name)))["state_dict"]


@pytest.mark.parametrize("last", [4, 8])
def test_stopping_returns_its_exit_code_and_keeps_the_checkpoint_from_before(
    flags: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any, last: int
) -> None:
    """Also at the last step, after which there is no step in which the host could check it."""
    spoil_loss([last], replace=monkeypatch.setattr)
    assert run("fit", *flags, *QUICK, "--last_checkpoint.every_n_steps=1") == Exit.NON_FINITE
    shown = capsys.readouterr()
    assert f"training stopped: step {last} was skipped: loss nan" in shown.err
    assert "diagnosis: error: the loss or the gradient is not finite" in shown.out
    assert newest_step(only_run(tmp_path)) == last - 1
    assert is_finite(saved_weights(tmp_path))


def test_skip_has_patience(flags: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    spoil_loss(range(3, 9), replace=monkeypatch.setattr)
    skip = ["--numerics.on_non_finite=skip", "--numerics.patience=3"]
    assert run("fit", *flags, *QUICK, *skip) == Exit.NON_FINITE
    found = [(each["step"], each["decision"]) for each in read_incidents(only_run(tmp_path))]
    assert found == [(3, "skip"), (4, "skip"), (5, "stop")]


@pytest.mark.slow
def test_no_checkpoint_has_non_finite_weights(flags: Any, tmp_path: Path, monkeypatch: Any) -> None:
    step = LanguageModule.optimizer_step

    def then_plant(self: Any, *args: Any, **options: Any) -> None:
        step(self, *args, **options)
        if self.global_step == 3:  # it is counted later
            next(iter(self.parameters())).data.view(-1)[7] = math.nan

    monkeypatch.setattr(LanguageModule, "optimizer_step", then_plant)
    assert run("fit", *flags, *QUICK, "--last_checkpoint.every_n_steps=2") == Exit.NON_FINITE
    assert newest_step(only_run(tmp_path)) == 2

    monkeypatch.setattr(numerics, "_weights_are_finite", lambda *_: True)
    run("fit", *flags, *QUICK, "--trainer.max_steps=4", "--run.name=red")
    assert not is_finite(saved_weights(tmp_path, "red"))


def test_an_optimizer_that_is_not_fused_skips_the_step_too(
    flags: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    spoil_loss([4], replace=monkeypatch.setattr)
    sgd = lambda self: torch.optim.SGD(self.parameters(), lr=0.1)  # noqa: E731
    monkeypatch.setattr(LanguageModule, "configure_optimizers", sgd)
    assert run("fit", *flags, *QUICK, "--numerics.on_non_finite=skip") == 0
    assert is_finite(saved_weights(tmp_path)) and len(read_incidents(only_run(tmp_path))) == 1


@pytest.mark.parametrize(("own", "everywhere"), [(1.0, math.nan), (math.nan, math.nan), (1.0, 1.0)])
def test_the_loss_scale_falls_where_the_gradient_is_finite(own: float, everywhere: float) -> None:
    """Else the ranks' scales differ, and the next steps' sums of gradients are wrong."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.AdamW([weight]), torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(weight.sum() * own).backward()
    scaler.unscale_(optimizer)
    non_finite = torch.tensor(float(not math.isfinite(everywhere)))
    numerics._skip_step(optimizer, torch.tensor(1.0), non_finite, scaler)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (256.0 if everywhere == 1.0 else 128.0)
    assert weight.tolist() == [1.0] * 3


def judged(guard: Numerics, norm: float, scaler: Any) -> str:
    """Returns how the guard reacts to a step with a finite loss and this norm."""
    trainer = SimpleNamespace(is_global_zero=True, datamodule=SimpleNamespace(rank=0))
    trainer.precision_plugin = SimpleNamespace(precision="16-mixed", scaler=scaler)
    guard._uses_deepspeed = False
    values = torch.tensor([2.0, norm, math.inf, float(not math.isfinite(norm))])
    try:
        guard._act_on(trainer, StepCheck(values, step=3))
    except Ended as ended:
        return ended.code.name
    return "continues"


def test_an_overflow_of_the_loss_scaler_is_an_incident_only_after_patience(tmp_path: Path) -> None:
    guard = Numerics(folder=str(tmp_path), patience=3)
    norms = [math.inf, math.inf, 1.0, math.inf, math.inf]
    assert [judged(guard, norm, scaler=object()) for norm in norms] == ["continues"] * 5
    assert judged(guard, math.inf, scaler=object()) == "NON_FINITE"
    assert judged(Numerics(folder=str(tmp_path)), math.inf, scaler=None) == "NON_FINITE"


def test_the_spike_limit_is_robust_and_inactive_for_half_a_window() -> None:
    guard = Numerics(on_spike="skip", spike_window=8, spike_sigmas=6)
    losses = [2.0, 2.1, 1.9, 90.0, 2.05, 1.95]  # a spike in the window
    limits = []
    for step, loss in enumerate(losses):
        limits.append(guard._limit().item())
        guard._recent[step] = loss
        guard._steps += 1
    assert limits[:4] == [math.inf] * 4
    # median of 1.9 2.0 2.1 90: 2.0 (the lower middle); of deviations 0 0.1 0.1 88: 0.1
    assert limits[4] == pytest.approx(2.0 + 6 * 1.4826 * 0.1, rel=1e-4)
    resumed = Numerics(on_spike="skip", spike_window=8, spike_sigmas=6)
    resumed.load_state_dict(guard.state_dict())
    assert resumed._limit() == guard._limit() < 4, "a resumed run has the window"


STRATEGIES = ["ddp", "fsdp2", "fsdp2_ep", "zero1", "zero2", "zero3"]
BAD_STEP = 7
SKIP = "--numerics.on_non_finite=skip"
SPIKES = ["--numerics.on_spike=skip", "--numerics.spike_window=8", "--numerics.spike_sigmas=6"]
SPIKE = partial(spoil_loss, [BAD_STEP], rank=1, micro_batch=1, factor=50.0)


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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(STRATEGIES, daily=["fsdp2_ep", "zero3"]))
def test_a_step_with_nan_on_one_rank_is_skipped_and_recorded(guarded: Train, strategy: str) -> None:
    run = guarded(strategy, "skip", partial(spoil_loss, [BAD_STEP], rank=1), SKIP)
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
@pytest.mark.parametrize(("strategy", "value"), tiers(DAMAGED, daily=DAMAGED[:1]))
def test_all_ranks_skip_a_step_whose_reduced_gradient_is_damaged_on_one(
    guarded: Train, strategy: str, value: float
) -> None:
    """A corrupted kernel, or a user's hook: the other ranks' loss and norm are finite."""
    spoil = partial(spoil_reduced_gradient, BAD_STEP, rank=1, value=value)
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


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "config", "fault"), tiers(OTHERS, daily=OTHERS[:1]))
def test_deepspeeds_other_optimizers_skip_exactly_one_step(
    guarded: Train, strategy: str, config: str, fault: str, tmp_path: Path
) -> None:
    (tmp_path / "deepspeed.json").write_text(config)
    flags = [BF16, SKIP, *SPIKES]
    flags += [f"--trainer.strategy.init_args.config={tmp_path}/deepspeed.json"] if config else []
    plant = SPIKE if fault == "spike" else partial(spoil_gradient, BAD_STEP, 0)
    run = guarded(strategy, f"{fault}-bf16", plant, *flags)
    incident = skipped(run, fault)
    if fault == "spike":
        assert incident["suspects"] == [1] and incident["loss"] > incident["limit"] > 0
    for name, weight in guarded.by_hand("ddp", BAD_STEP).items():
        difference = run.end[name].float() - weight
        assert difference.norm() < 0.03 * weight.norm(), f"{name}: bf16 makes 0.01, that step 0.08"
