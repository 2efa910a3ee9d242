"""A launch target of another package: the class of docs/launch.md, found by an entry point."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_template.errors import Exit
from tests import ROOT
from tests.support.installed import write_metadata
from tests.support.line import main
from tests.support.runs import PROJECT

LSF = """#!/bin/sh
echo "$(basename $0) $@" >> {folder}/called
case $0 in *bsub) echo 17;; *bjobs) echo "17 RUN";; *bkill) echo signalled;; esac
"""


def register(folder: Path, package: str, value: str) -> None:
    """Writes the metadata of a package, as pip does."""
    write_metadata(folder, package, {"dist_template.launch_targets": {"lsf": value}})


@pytest.fixture
def lsf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The documented class as an installed package, and its scheduler; returns the latter's log."""
    monkeypatch.chdir(PROJECT)
    monkeypatch.syspath_prepend(tmp_path)
    page = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```python\n(.*?class Lsf.*?)```", page, re.DOTALL)
    (tmp_path / "lsf_of_a_site.py").write_text(text)
    register(tmp_path, "site-tools", "lsf_of_a_site:Lsf")
    for name in ("bsub", "bjobs", "bkill"):
        (tmp_path / name).write_text(LSF.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("DIST_RUN_ID", "own")
    monkeypatch.delitem(sys.modules, "lsf_of_a_site", raising=False)
    return tmp_path / "called"


def test_a_target_of_another_package_renders_submits_and_answers(
    lsf: Path, flags: list[str], tmp_path: Path, capsys: Any
) -> None:
    sizes = ["--cluster.nodes=2", "--cluster.devices_per_node=3", "--data.global_batch_size=192"]
    given = ["launch", "--on=lsf", "--cluster.partition=short", *flags, *sizes]
    assert main([*given, "--dry-run"]) == Exit.DONE
    printed = capsys.readouterr().out
    folder = tmp_path / "runs" / "default" / "own" / "launch"
    assert f"# would run: bsub -q short -n 2 {folder}/job.sh" in printed and not lsf.exists()
    assert main(given) == Exit.DONE
    assert "torchrun --nproc-per-node=3 -m trainer_dev fit" in (folder / "job.sh").read_text()
    assert json.loads((folder / "launch.json").read_text())["id"] == "17"
    for verb, answer in (("status", "17 RUN"), ("stop", "signalled"), ("logs", "")):
        capsys.readouterr()
        assert main(["launch", verb, str(folder.parent)]) == Exit.DONE
        assert answer in capsys.readouterr().out
    assert lsf.read_text().splitlines() == [
        f"bsub -q short -n 2 {folder}/job.sh",
        "bjobs 17",
        "bkill -s USR1 17",
    ]


def test_one_name_of_two_packages_is_refused_with_both(lsf: Path, capsys: Any) -> None:
    assert main(["launch", "--on", "slrum"]) == Exit.BAD_INPUT
    assert "argument --on: invalid choice: 'slrum'" in capsys.readouterr().err
    register(lsf.parent, "other-tools", "json:loads")
    assert main(["launch", "--on", "lsf"]) == Exit.BAD_INPUT
    error = capsys.readouterr().err
    assert "site-tools" in error and "other-tools" in error and "'lsf'" in error
