"""Trainings for tests: the command line in this process, in another, or on several ranks."""

import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch import Callback

from dist_template.checkpoint import manifest
from dist_template.cli import main as command_line
from dist_template.observe.history.run import RunFile, read_lines
from dist_template.project import Project
from dist_template.wings.history import read_run
from dist_template.wings.rehearse.record import RunRecord
from dist_template.wings.rehearse.workers import run_ranks
from tests import PROJECT, ROOT
from tests.support.line import OURS, PACKAGE, command, main  # noqa: F401

CONFIGS = PROJECT / "configs"
SHIPPED = ROOT / "src" / "dist_template" / "configs"
OTHERS = {"evaluate", "sweep"}  # files of these verbs
ALL_CONFIGS = [*sorted(CONFIGS.rglob("*.yaml")), *sorted(SHIPPED.rglob("*.yaml"))]
FIT_CONFIGS = [path for path in ALL_CONFIGS if not {path.stem, path.parent.name} & OTHERS]

SENTENCES = (
    "The cache is written once. Every rank maps it. Ranks never tokenize, whatever happens. ÄÖ€😀\n"
)
SMALL_LLAMA = """{model_type: llama, hidden_size: 32, intermediate_size: 64, \
num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2}"""


def small(corpus: Path, cache: Path, folder: Path) -> list[str]:
    """A complete small training on one CPU process, writing into `folder`."""
    flags = f"""--run.root={folder / "runs"} --run.report=false
        --data.source=TextFiles --data.source.paths=[{corpus}/*.txt] --data.tokenizer=Bytes
        --data.cache_dir={cache} --data.seq_len=32 --data.global_batch_size=8
        --data.micro_batch_size=2 --data.validation_share=0.15 --data.test_share=0.15
        --model.sample_tokens=4 --trainer.accelerator=cpu --trainer.devices=1
        --trainer.max_steps=20 --trainer.log_every_n_steps=1 --trainer.val_check_interval=10"""
    return [*flags.split(), f"--model.architecture={SMALL_LLAMA}"]


# What a training in this process leaves behind, and a new one would take for its launcher's.
# WANDB_SERVICE: the address of this process's service, which would then have both runs.
OF_ANOTHER_RUN = {
    *"""DIST_RUN_ID MASTER_ADDR MASTER_PORT RANK LOCAL_RANK NODE_RANK WORLD_SIZE
    WANDB_SERVICE""".split()
}


def clean_environment(**variables: str) -> dict[str, str]:
    """The variables for a process that a user starts, and further ones."""
    return {k: v for k, v in os.environ.items() if k not in OF_ANOTHER_RUN} | variables


class StopAfter(Callback):
    """Ends training the hard way once `step` optimizer steps are done, as a crash would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step >= self.step:
            raise RuntimeError("stopped by the test")


def run(verb: str, *flags: str) -> int:
    """The command line in this process; for one training process, and quicker than a new Python."""
    os.environ.pop("DIST_RUN_ID", None)
    return main([verb, *flags])


@dataclass
class Workers:
    """`num` CPU processes that run a project's command; none is left after it."""

    num: int
    project: Project = OURS

    def run(self, argv: Sequence[str], record: Path, **options: Any) -> RunRecord:
        return run_ranks(self.num, self.project, argv, record, **options)


def run_in_subprocess(verb: str, *flags: str, **given: str) -> subprocess.CompletedProcess[str]:
    """`python -m <package> VERB …` as typed; needed where Lightning starts further processes."""
    env = clean_environment(**given, OMP_NUM_THREADS="1")
    argv = [sys.executable, "-m", PACKAGE, verb, *flags]
    options: Any = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    return subprocess.run(argv, env=env, cwd=PROJECT, **options)


def only_run(root: Path, name: str = "default") -> Path:
    (found,) = (root / "runs" / name).iterdir()
    return found


def newest(run_folder: Path) -> Path:
    found = manifest.newest(run_folder / "checkpoints")
    assert found, f"no checkpoint in {run_folder}"
    return found


def logged(run_folder: Path, metric: str) -> dict[int, float]:
    """Step -> value of `metric`, of a run and its resumptions."""
    series = read_run(run_folder).metrics[metric]
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


@contextmanager
def disk(folder: Path, size: str) -> Generator[Path]:
    """A file system of its own of that size; the test is skipped where none can be mounted."""
    folder.mkdir()
    mount = shutil.which("mount")
    argv = [str(mount), "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if not mount or subprocess.run(argv, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def refused(
    verb: str, flags: list[str], capfd: pytest.CaptureFixture[str], project: Project = OURS
) -> str:
    """The one sentence of a command that must end with exit code 2."""
    capfd.readouterr()
    os.environ.pop("DIST_RUN_ID", None)  # of the run before
    try:
        code: Any = command_line.command([verb, *flags], project)
    except SystemExit as stopped:
        code = stopped.code
    error = capfd.readouterr().err
    assert code == 2, error
    assert "Traceback" not in error and len(error.strip().splitlines()) == 1, error
    return error


def quiet(_: str) -> None:
    pass


def read_incidents(run: Path) -> list[dict[str, Any]]:
    return read_lines(run / RunFile.INCIDENTS)
