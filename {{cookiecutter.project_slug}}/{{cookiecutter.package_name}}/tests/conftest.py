"""What the tests share: a small corpus, a small model, and the command line as a user has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from ..__main__ import main
from ..checkpoint import commit
from ..data import DataModule
from ..history.metrics import read_metrics
from ..text.sources import TextFiles
from ..text.tokenizers import Bytes

torch.set_num_threads(1)  # small tensors; threads would wait for each other

PACKAGE = __name__.split(".")[0]
PROJECT = Path(__file__).parents[2]
CONFIGS = PROJECT / "configs"

SENTENCES = "The cache is written once. Every rank maps it. Ranks never tokenize, whatever happens. ÄÖ€😀\n"
SMALL_LLAMA = (
    "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,"
    " num_key_value_heads: 2}"
)


# What a training in this process leaves behind, and a new one would take for its launcher's.
OF_ANOTHER_RUN = {"DIST_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"}


class StopAfter(Callback):
    """Ends training the hard way once `step` optimizer steps are done, as a crash would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step >= self.step:
            raise RuntimeError("stopped by the test")


@pytest.fixture(autouse=True)
def process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a training in this process leaves is gone after the test: the next would take it for a launcher's."""
    for name in OF_ANOTHER_RUN:
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    yield
    if "deepspeed" in sys.modules and sys.modules["deepspeed"].comm.is_initialized():
        sys.modules["deepspeed"].comm.destroy_process_group()  # and DeepSpeed's references to it
    elif dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 60 short texts of a few repeated words, so that a small model learns something in few steps."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(60):
        line = f"document {number}: " + "the quick brown fox jumps over the lazy dog. " * (4 + number % 5)
        (folder / f"{number:02}.txt").write_text(line, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def flags(corpus: Path, cache: Path, tmp_path: Path) -> list[str]:
    """A complete small training on one CPU process, writing into this test's own folder."""
    return [
        f"--run.root={tmp_path / 'runs'}",
        "--run.report=false",  # 5 MB and a second
        "--data.source=TextFiles",
        f"--data.source.paths=[{corpus}/*.txt]",
        "--data.tokenizer=Bytes",
        f"--data.cache_dir={cache}",
        "--data.seq_len=32",
        "--data.global_batch_size=8",
        "--data.micro_batch_size=2",
        "--data.validation_share=0.15",
        "--data.test_share=0.15",
        f"--model.architecture={SMALL_LLAMA}",
        "--model.sample_tokens=4",
        "--trainer.accelerator=cpu",
        "--trainer.devices=1",
        "--trainer.max_steps=20",
        "--trainer.log_every_n_steps=1",
        "--trainer.val_check_interval=10",
    ]


def run(verb: str, *flags: str) -> int:
    """The command line in this process; for one training process, and quicker than a new Python."""
    os.environ.pop("DIST_RUN_ID", None)
    return main([verb, *flags])


def run_in_subprocess(verb: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m <package> VERB …` as a user types it; needed where Lightning starts further processes."""
    env = {k: v for k, v in os.environ.items() if k not in OF_ANOTHER_RUN} | environment
    env |= {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", PACKAGE, verb, *flags]
    return subprocess.run(command, env=env, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)


def only_run(root: Path, name: str = "default") -> Path:
    """The folder of the one run under `root`."""
    (found,) = (root / "runs" / name).iterdir()
    return found


def newest(run_folder: Path) -> Path:
    """A run's newest checkpoint."""
    found = commit.newest(run_folder / "checkpoints")
    assert found, f"no checkpoint in {run_folder}"
    return found


def logged(run_folder: Path, metric: str) -> dict[int, float]:
    """Step -> value of `metric`, of a run and its resumptions."""
    series = read_metrics(run_folder)[metric]
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


@contextmanager
def disk(folder: Path, size: str) -> Generator[Path]:
    """A file system of its own of that size, where this machine lets us mount one; the test is skipped elsewhere."""
    folder.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if not mount or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def quiet(_: str) -> None:
    pass


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """40 documents, the last a duplicate of the first."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"{number % 39}\n" + SENTENCES * (1 + number % 39 % 5), "utf-8")
    return folder


@pytest.fixture
def data(texts: Path, tmp_path: Path) -> DataModule:
    return DataModule(
        TextFiles([f"{texts}/*.txt"]),
        Bytes(),
        seq_len=32,
        validation_share=0.2,
        test_share=0.2,
        cache_dir=str(tmp_path / "cache"),
    )
