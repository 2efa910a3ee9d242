"""Without the packages of the extras: most of it trains; what needs one names the command that installs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.extras import without_extras
from tests.support.runs import run, run_in_subprocess

LIBRARY = "'dist-template["
NEED = {
    "deepspeed": ("fit", ["--config=strategy/zero2"], f"pip install --no-build-isolation {LIBRARY}"),
    "wandb": ("fit", ["--config=logger/wandb"], f"pip install {LIBRARY}"),
    "tensorboard": ("fit", ["--trainer.logger=TensorBoard"], f"pip install {LIBRARY}"),
    "datasets": ("prepare", ["--data.source=HubDataset", "--data.source.name={}"], f"pip install {LIBRARY}"),
}


@pytest.mark.slow
def test_a_training_needs_none_of_them(flags: list[str], tmp_path: Path) -> None:
    """In a Python in which these packages cannot be imported; DDP, with the default loggers and the report."""
    path = os.pathsep.join([without_extras(tmp_path), os.environ["PYTHONPATH"]])
    short = ["--trainer.strategy=ddp", "--trainer.max_steps=2", "--model.optim.warmup=0", "--run.report=true"]
    done = run_in_subprocess("fit", *flags, *short, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    cure = "the report needs the package plotly: pip install 'dist-template[report]'"
    assert f"at_run_end of diagnose failed: {cure}" in done.stderr


@pytest.mark.parametrize("package", NEED)
def test_what_needs_one_says_how_to_install_it(
    package: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "one"}\n')
    verb, given, command = NEED[package]
    monkeypatch.setitem(sys.modules, package, None)
    assert run(verb, *flags, *(flag.format(texts) for flag in given)) == 2
    error = capfd.readouterr().err
    assert f" needs the package {package}: {command}{package}]'" in error and error.count("\n") == 1, error
