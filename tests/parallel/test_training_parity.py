"""The same numbers however the work is dealt out or interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.runs import logged, newest, only_run, run
from tests.support.tiers import tiers


@pytest.mark.parametrize(
    ("stop_after", "workers"), tiers([(7, 0), (10, 2), (13, 0)], daily=[(7, 0)])
)
def test_a_resumed_run_ends_bit_identical_to_one_never_stopped(
    flags: list[str], tmp_path: Path, stop_after: int, workers: int
) -> None:
    flags = [*flags, "--last_checkpoint.every_n_steps=3", f"--data.num_workers={workers}"]
    assert run("fit", *flags, "--run.name=whole") == 0
    with pytest.raises(RuntimeError, match="stopped by the test"):
        stop = "tests.support.runs.StopAfter"
        run(
            "fit", *flags, "--run.name=cut", f"--trainer.callbacks+={stop}",
            f"--trainer.callbacks.step={stop_after}",
        )  # fmt: skip
    assert max(logged(only_run(tmp_path, "cut"), "train/loss"), default=0) < 20
    assert run("fit", *flags, "--run.name=cut", "--ckpt_path=last") == 0

    whole, cut = only_run(tmp_path, "whole"), only_run(tmp_path, "cut")
    expected, got = logged(whole, "train/loss"), logged(cut, "train/loss")
    assert got[20] == expected[20]
    assert {step: expected[step] for step in got} == got
    states = [
        torch.load(newest(r) / "checkpoint.pt", weights_only=True)["state_dict"]
        for r in (whole, cut)
    ]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
