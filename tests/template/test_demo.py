"""What `make demo` prints at its end can be typed as it stands."""

import shlex
import sys
from pathlib import Path

import pytest

from tests.support.written import falling, write_run

from .conftest import ROOT, bake_into, output

VERBS = ("diagnose", "report", "evaluate", "export", "serve")


def printed(build: Path) -> list[str]:
    lines = output("make", "-s", "demo-next", f"OUT={build}", cwd=ROOT).splitlines()
    return [line.strip() for line in lines if line.startswith("  ")]


def typed(commands: list[str], cwd: Path) -> str:
    return output("bash", "-ec", "\n".join(commands), cwd=cwd, DS_ACCELERATOR="cpu")


def test_the_demo_ends_with_commands(tmp_path: Path) -> None:
    """Without a training: verbs that read a run's records."""
    project = bake_into(tmp_path / "build")
    write_run(project.path / "runs" / "quickstart" / "1", falling(5))
    entered, *commands = printed(tmp_path / "build")
    assert [shlex.split(command)[3] for command in commands] == [*VERBS]
    shown = typed([entered, *commands[:2]], tmp_path)
    assert "runs/quickstart/1/report.html" in shown, shown


@pytest.mark.slow
@pytest.mark.nightly
def test_the_commands_after_a_demo_run(tmp_path: Path) -> None:
    """`serve` runs until it is stopped: tests/wings/test_serve.py."""
    project = bake_into(tmp_path / "build")
    train = [sys.executable, "-m", project.package, "fit", "--config", "configs/quickstart.yaml"]
    output(*train, "--trainer.max_steps=4", cwd=project.path, DS_ACCELERATOR="cpu")
    shown = typed(printed(tmp_path / "build")[:-1], tmp_path)
    assert "against" in shown and (project.path / "exported" / "model.safetensors").exists()
