"""`fit` as a user types it for two processes: Lightning starts the second one."""

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.distributed import _suggested_max_num_threads
from lightning.pytorch import Callback

from tests.support.runs import PACKAGE, PROJECT, clean_environment, logged, only_run, small

pytestmark = pytest.mark.slow


class Reports(Callback):
    """Warns, and reports torch's number of threads and the variable for child processes."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        rank, log = f"rank {trainer.global_rank}", logging.getLogger("some.library")
        warnings.warn(f"{rank} warns", stacklevel=1)
        log.warning("%s warns in a log", rank)
        found = (torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"))
        log.error("%s has %s threads, %s for a child", rank, *found)


@pytest.fixture(scope="module")
def printed(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """On standard error. Nobody has set the number of threads."""
    folder = tmp_path_factory.mktemp("typed")
    flags = [*small(corpus, cache, folder), f"--trainer.callbacks+={__name__}.Reports"]
    flags += ["--trainer.max_steps=2", "--trainer.devices=2", "--trainer.strategy=ddp"]
    env = clean_environment()
    env.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-m", PACKAGE, "fit", *flags]
    options: Any = {"env": env, "cwd": PROJECT, "capture_output": True, "text": True}
    result = subprocess.run(command, timeout=300, check=False, **options)
    assert result.returncode == 0, result.stderr
    assert [*logged(only_run(folder), "train/loss")] == [1, 2], "both ranks are of one run"
    return result.stderr


def test_rank_0_alone_prints_warnings(printed: str) -> None:
    assert "rank 0 warns\n" in printed and "rank 0 warns in a log\n" in printed
    assert "rank 1 warns" not in printed


def test_where_nobody_has_set_the_threads_each_process_has_its_share(printed: str) -> None:
    """Lightning would do so in the first alone. The errors of both ranks are printed."""
    share = _suggested_max_num_threads(2)
    for rank in range(2):
        assert f"rank {rank} has {share} threads, {share} for a child\n" in printed
