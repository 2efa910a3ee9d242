"""The default project does what its own Makefile says, in an environment of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import OUTER, ROOT, BakedProject, bake_into, make


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
    """A stand-in for pip prints what it would install; nothing is downloaded."""
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
@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_a_fresh_environment_trains_vendors_the_library_and_is_built_again_without_a_network(tmp_path: Path) -> None:
    project = bake_into(tmp_path)

    def done(*arguments: str) -> str:
        made = make(project, *arguments)
        print(made.stdout)
        assert made.returncode == 0, made.stdout[-5000:]
        return made.stdout

    def place() -> Path:
        where = [".venv/bin/python", "-c", "import dist_template; print(dist_template.__file__)"]
        settings = {key: value for key, value in os.environ.items() if key not in OUTER}
        found = subprocess.run(where, cwd=project.path, env=settings, capture_output=True, text=True, check=True)
        return Path(found.stdout.strip()).parent

    done("setup")
    assert place() == ROOT / "src" / "dist_template", "a change in the checkout counts at once"
    done("check")
    assert " passed" in done("test")
    assert "Nothing to be done" in done("setup"), "the second setup builds what is there"
    done("wheels")
    shutil.rmtree(project.path / ".venv")
    done("setup", "PIP_INDEX_URL=http://127.0.0.1:9", "PIP_EXTRA_INDEX_URL=")
    assert project.path / ".venv" in place().parents, "the library is a wheel as well"
    done("vendor")
    assert place() == project.path / "vendor" / "dist-template" / "src" / "dist_template"
    done("train", "ARGS=--trainer.max_steps 2 --model.optim.warmup 0 --data.prompts []")
