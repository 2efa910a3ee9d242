"""`bench` measures what a user has, in the words of flags that he can type, and leaves nothing behind."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from tests.support.runs import CONFIGS, run


def test_what_cannot_be_measured_is_refused(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", *flags, "--rounds=0") == 2
    assert "--rounds 0" in capfd.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run("bench", *flags) == 2
    assert "without a launcher" in capfd.readouterr().err


@pytest.mark.slow
def test_a_configuration_for_many_ranks_is_measured_on_one_device_and_leaves_nothing(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    many = [f"--config={CONFIGS}/strategy/fsdp2.yaml", "--trainer.devices=8", "--data.global_batch_size=64"]
    short = ["--steps=2", "--rounds=1", "--only=micro_batch"]
    assert run("bench", *flags, *many, *short) == 0
    out, _ = capfd.readouterr()
    assert "micro-batches of 2 x 32 tokens, as configured" in out
    assert re.search(r"over the bare loop +\d\.\d+ \(\d", out) and re.search(r"waiting for data +\d", out)
    assert re.search(r"--data.micro_batch_size=4 +\d\.\d+ \(", out) and "compile" not in out, "only what was asked for"
    assert not any(scratch.iterdir()) and not (tmp_path / "runs").exists()
    assert run("bench", *flags, "--steps=6", "--rounds=1", "--only=none") == 2
    assert "training ended after 20 steps, bench needs 24" in capfd.readouterr().err
