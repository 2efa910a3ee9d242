"""`fit` as a user types it for two processes: Lightning starts the second one."""

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.fabric.utilities.distributed import _suggested_max_num_threads
from lightning.pytorch import Callback

from tests.support.parity import MODELS
from tests.support.runs import PACKAGE, PROJECT, clean_environment, logged, only_run, run, small

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
    flags: list[str]
    printed: str  # on standard error


@pytest.fixture(scope="module")
def typed(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Typed]:
    """With clipping; nobody has set the number of threads."""
    folder = tmp_path_factory.mktemp("typed")
    flags = [*small(corpus, cache, folder), f"--model.architecture={MODELS['deepseek_v3']}"]
    flags += ["--model.optim.learning_rate=0.01", "--model.optim.warmup=5"]
    flags += ["--trainer.gradient_clip_val=0.5"]
    two = ["--run.name=two", "--trainer.devices=2", "--trainer.strategy=ddp"]
    two += [f"--trainer.callbacks+={__name__}.Reports"]
    env = clean_environment(THREADS_INTO=str(folder))
    env.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-m", PACKAGE, "fit", *flags, *two]
    options: Any = {"env": env, "cwd": PROJECT, "capture_output": True, "text": True}
    result = subprocess.run(command, timeout=300, check=False, **options)
    assert result.returncode == 0, result.stderr
    yield Typed(folder, flags, result.stderr)


def test_one_and_two_processes_have_the_same_loss_at_each_of_20_steps(typed: Typed) -> None:
    # 8 sequences a step: 1 process x 2 x 4 accumulated, 2 processes x 2 x 2 accumulated
    assert run("fit", *typed.flags, "--run.name=one") == 0
    one, two = only_run(typed.folder, "one"), only_run(typed.folder, "two")
    loss = logged(one, "train/loss")
    assert list(loss) == list(range(1, 21))
    assert logged(two, "train/loss") == pytest.approx(loss, rel=1e-5)
    norms = logged(one, "train/grad_norm")
    assert logged(two, "train/grad_norm") == pytest.approx(norms, rel=1e-4)
    assert sum(norm > 0.5 for norm in norms.values()) >= 10, "clipping must have been at work"
    assert len(set(logged(one, "train/learning_rate").values())) > 10, "the schedule is at work"
    assert logged(two, "eval/loss") == pytest.approx(logged(one, "eval/loss"), rel=1e-5)


def test_rank_0_prints_warnings_and_each_rank_its_errors(typed: Typed) -> None:
    for ending in ("warns", "warns in a log", "fails in a log"):
        assert f"rank 0 {ending}\n" in typed.printed
    assert "rank 1 warns" not in typed.printed and "rank 1 fails in a log" in typed.printed


def test_where_nobody_has_set_the_threads_each_process_has_its_share(typed: Typed) -> None:
    """Lightning would do so in the first alone, and the others would have all cores each."""
    share = _suggested_max_num_threads(2)
    for rank in range(2):
        assert json.loads((typed.folder / f"rank{rank}").read_text()) == [share, str(share)]
