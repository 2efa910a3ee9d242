"""The same numbers however the work is dealt out or interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.runs import logged, newest, only_run, run
from tests.support.tiers import tiers


@pytest.mark.slow
def test_micro_batch_size_does_not_change_the_loss(flags: list[str], tmp_path: Path) -> None:
    for micro in (1, 8):
        assert run("fit", *flags, f"--run.name=m{micro}", f"--data.micro_batch_size={micro}") == 0
    losses = [logged(only_run(tmp_path, name), "train/loss") for name in ("m1", "m8")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("stop_after", tiers([7, 10, 13], daily=[7]))
def test_a_resumed_run_ends_bit_identical_to_one_never_stopped(
    flags: list[str], tmp_path: Path, stop_after: int
) -> None:
    flags = [*flags, "--last_checkpoint.every_n_steps=3"]
    assert run("fit", *flags, "--run.name=whole") == 0
    with pytest.raises(RuntimeError, match="stopped by the test"):
        stop = "tests.support.runs.StopAfter"
        run("fit", *flags, "--run.name=cut", f"--trainer.callbacks+={stop}", f"--trainer.callbacks.step={stop_after}")
    assert max(logged(only_run(tmp_path, "cut"), "train/loss"), default=0) < 20
    assert run("fit", *flags, "--run.name=cut", "--ckpt_path=last") == 0

    whole, cut = only_run(tmp_path, "whole"), only_run(tmp_path, "cut")
    expected, got = logged(whole, "train/loss"), logged(cut, "train/loss")
    assert got[20] == expected[20]
    assert {step: expected[step] for step in got} == got
    states = [torch.load(newest(r) / "checkpoint.pt", weights_only=True)["state_dict"] for r in (whole, cut)]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


@pytest.mark.slow
def test_training_beyond_an_epoch_resumes_in_the_later_epoch(flags: list[str], tmp_path: Path) -> None:
    flags = [*flags, "--last_checkpoint.every_n_steps=5", "--data.seq_len=128"]  # about 11 steps an epoch
    assert run("fit", *flags, "--run.name=whole") == 0
    with pytest.raises(RuntimeError, match="stopped by the test"):
        stop = "tests.support.runs.StopAfter"
        run("fit", *flags, "--run.name=cut", f"--trainer.callbacks+={stop}", "--trainer.callbacks.step=17")
    assert run("fit", *flags, "--run.name=cut", "--ckpt_path=last") == 0
    expected = logged(only_run(tmp_path, "whole"), "train/loss")
    got = logged(only_run(tmp_path, "cut"), "train/loss")
    assert got[20] == expected[20]
    assert {step: expected[step] for step in got} == got
