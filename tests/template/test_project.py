"""The default project does what its own Makefile says, in an environment of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from .conftest import OUTER, ROOT, bake_into, make


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_a_fresh_environment_trains_and_is_built_again_without_a_network_and_from_vendor(
    repository: Path, tmp_path: Path
) -> None:
    project = bake_into(tmp_path)

    def done(*arguments: str) -> str:
        made = make(project, *arguments)
        print(made.stdout)
        assert made.returncode == 0, made.stdout[-5000:]
        return made.stdout

    def place() -> Path:
        where = [".venv/bin/python", "-c", "import dist_template; print(dist_template.__file__)"]
        settings = {key: value for key, value in os.environ.items() if key not in OUTER}
        found = subprocess.run(
            where, cwd=project.path, env=settings, capture_output=True, text=True, check=True
        )
        return Path(found.stdout.strip()).parent

    done("setup")
    assert place() == ROOT / "src" / "dist_template", "a change in the checkout counts at once"
    done("check")
    assert " passed" in done("test")
    assert "Nothing to be done" in done("setup"), "the second setup builds what is there"
    page = (ROOT / "docs" / "supply_chain.md").read_text(encoding="utf-8")
    for line in re.findall(r"^\.venv/bin/python -m pip wheel .*$", page, re.MULTILINE):
        subprocess.run(["bash", "-c", line], cwd=project.path, check=True)
    shutil.rmtree(project.path / ".venv")
    done("setup", "PIP_INDEX_URL=http://127.0.0.1:9", "PIP_EXTRA_INDEX_URL=")
    assert project.path / ".venv" in place().parents, "the library is a wheel as well"
    shutil.rmtree(project.path / "wheels")
    for line in re.findall(r"^(?:git clone|sed -i).*$", page, re.MULTILINE):
        line = line.replace("<address>", str(repository))
        subprocess.run(["bash", "-c", line], cwd=project.path, check=True)
    assert place() == project.path / "vendor" / "dist-template" / "src" / "dist_template"
    done("train", "ARGS=--trainer.max_steps 2 --model.optim.warmup 0 --data.prompts []")
