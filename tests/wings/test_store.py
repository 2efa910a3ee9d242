"""`run.store`: checkpoints and files of a run in a store, from which it continues."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from tests.support.library import read_full
from tests.support.runs import StopAfter, logged, newest, only_run, run

STORE = "memory://bucket/prefix"
STOPS = [f"--trainer.callbacks+={StopAfter.__module__}.StopAfter", "--trainer.callbacks.step=12"]


@pytest.fixture
def memory() -> Iterator[Any]:
    found = fsspec.filesystem("memory")
    found.store.clear()
    found.pseudo_dirs[:] = [""]
    yield found
    found.store.clear()


def test_a_run_that_loses_its_disk_continues_bit_identically(
    memory: Any, flags: list[str], tmp_path: Path
) -> None:
    flags += ["--last_checkpoint.every_n_steps=5", "--store.every_s=0"]
    assert run("fit", *flags, "--run.name=whole") == 0
    stored = [*flags, f"--run.store={STORE}"]
    with pytest.raises(RuntimeError, match="stopped by the test"):
        run("fit", *stored, *STOPS)
    folder = only_run(tmp_path)
    shutil.rmtree(tmp_path / "runs" / "default")
    assert run("fit", *stored, "--ckpt_path=last") == 0
    again = only_run(tmp_path)
    assert again == folder
    whole = only_run(tmp_path, "whole")
    assert logged(again, "train/loss") == logged(whole, "train/loss")
    one, other = (read_full(newest(path))["state_dict"] for path in (again, whole))
    assert all(torch.equal(one[name], other[name]) for name in one)
