"""The default project does what its own Makefile says, in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import BakedProject, bake_into

OUTER = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "RUN", "VENV", "ARGS", "CONFIG", "PYTHONPATH"}


def make(project: BakedProject, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    # Without the variables of a `make test` that this test runs under, and without this checkout's src/.
    settings = {key: value for key, value in os.environ.items() if key not in OUTER}
    return subprocess.run(
        ["make", *arguments],
        cwd=project.path,
        env=settings | ({"PATH": path} if path else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def test_bare_make_prints_the_commands(default: BakedProject) -> None:
    output = make(default).stdout
    assert all(f"make {target} " in output for target in ("setup", "check", "test", "train"))


def test_setup_says_which_python_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    trick = "import sys; sys.version_info = (3, 10, 1); exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{trick}" "$2"\n')
    old.chmod(0o755)
    done = make(bake_into(tmp_path), "setup", f"PYTHON={old}")
    assert done.returncode != 0 and "Python 3.11 or newer is needed, this is 3.10" in done.stdout


@pytest.mark.parametrize(("plan", "stopped"), [("nvidia-cudnn", True), ("sympy", False)])
def test_setup_stops_before_it_fetches_cuda_for_a_machine_without_a_gpu(
    tmp_path: Path, plan: str, stopped: bool
) -> None:
    """A stand-in for pip tells what it would install; nothing is downloaded."""
    project = bake_into(tmp_path)
    python = project.path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    packages = [{"metadata": {"name": name}} for name in ("torch", plan)]
    report = json.dumps({"install": packages})
    python.write_text(
        "#!/bin/bash\n"
        f"""case "$*" in *--dry-run*) echo '{report}';; "-m pip"*) ;; *) exec python3 "$@";; esac\n"""
    )
    python.chmod(0o755)
    tools = tmp_path / "bin"  # a PATH without nvidia-smi, wherever this runs
    tools.mkdir()
    (tools / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tools / "python3").chmod(0o755)
    for name in ("bash", "sh", "grep", "uname", "touch", "make", "test"):
        found = subprocess.run(["which", name], capture_output=True, text=True, check=True).stdout.strip()
        (tools / name).symlink_to(found)
    done = make(project, "setup", path=str(tools))
    assert (done.returncode != 0) == stopped, done.stdout
    assert ("CUDA build only" in done.stdout and "TORCH_INDEX=<address>" in done.stdout) == stopped
    if stopped:
        assert make(project, "setup", "TORCH_CUDA=1", path=str(tools)).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_fresh_environment_has_what_the_default_project_needs(tmp_path: Path) -> None:
    """`make setup`, the tools, every import of the tests, and the tests that use most packages.

    `make test` runs all tests of a default project after these, in an environment that the same `setup` has built.
    """
    project, needs = bake_into(tmp_path), "training_runs or parallel_zero or data_text or report_page or loggers"
    for target in (["setup"], ["check"], ["test", f"ARGS=-k '{needs}'"]):
        done = make(project, *target)
        print(done.stdout)
        assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
    again = make(project, "setup")
    assert "Nothing to be done" in again.stdout, "the second setup builds what is there"
