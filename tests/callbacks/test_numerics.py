"""The numerics guard on one process: its reactions to anomalous steps; no checkpoint has NaN."""

import math
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
from tests.support.numerics import is_finite, newest_step, spoil_loss
from tests.support.runs import newest, only_run, run

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
