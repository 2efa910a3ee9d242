"""`fit` as a user types it for two processes: Lightning starts the second one."""

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.fabric.utilities.distributed import _suggested_max_num_threads
from lightning.pytorch import Callback

from tests.support.runs import PACKAGE, PROJECT, clean_environment, logged, only_run, small

pytestmark = pytest.mark.slow


class Reports(Callback):
    """Records torch's number of threads, and OMP_NUM_THREADS for child processes; then warns and
    reports an error."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        path = Path(os.environ["THREADS_INTO"]) / f"rank{trainer.global_rank}"
        found = [torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")]
        path.write_text(json.dumps(found), encoding="utf-8")
        rank = f"rank {trainer.global_rank}"
        warnings.warn(f"{rank} warns", stacklevel=1)
        logging.getLogger("some.library").warning("%s warns in a log", rank)
        logging.getLogger("some.library").error("%s fails in a log", rank)


class Typed(NamedTuple):
    folder: Path
    printed: str  # on standard error


@pytest.fixture(scope="module")
def typed(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Typed:
    """Nobody has set the number of threads."""
    folder = tmp_path_factory.mktemp("typed")
    flags = [*small(corpus, cache, folder), f"--trainer.callbacks+={__name__}.Reports"]
    flags += ["--trainer.max_steps=2", "--trainer.devices=2", "--trainer.strategy=ddp"]
    env = clean_environment(THREADS_INTO=str(folder))
    env.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-m", PACKAGE, "fit", *flags]
    options: Any = {"env": env, "cwd": PROJECT, "capture_output": True, "text": True}
    result = subprocess.run(command, timeout=300, check=False, **options)
    assert result.returncode == 0, result.stderr
    assert [*logged(only_run(folder), "train/loss")] == [1, 2], "both ranks are of one run"
    return Typed(folder, result.stderr)


def test_rank_0_prints_warnings_and_each_rank_its_errors(typed: Typed) -> None:
    for ending in ("warns", "warns in a log", "fails in a log"):
        assert f"rank 0 {ending}\n" in typed.printed
    assert "rank 1 warns" not in typed.printed and "rank 1 fails in a log" in typed.printed


def test_where_nobody_has_set_the_threads_each_process_has_its_share(typed: Typed) -> None:
    """Lightning would do so in the first alone, and the others would have all cores each."""
    share = _suggested_max_num_threads(2)
    for rank in range(2):
        assert json.loads((typed.folder / f"rank{rank}").read_text()) == [share, str(share)]
