"""The five test files that ship pass in a fresh project, and find what a user's edit breaks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiers import tiers

from .conftest import SOURCE

PACKAGE = "trainer_dev"
MODULE, DATA = f"{PACKAGE}/module.py", f"{PACKAGE}/data.py"
MASK = 'batch["labels"]'

EDITS = {  # what a user did wrong: file, text there, text in its place, the tests that are run, the one that must fail
    "a misspelt key": (
        "configs/cluster.yaml", "precision: bf16-mixed", "precison: bf16-mixed",
        "tests/test_configs.py -k cluster", "test_a_configuration_can_be_added[configs/cluster]",
    ),
    "labels that are not shifted": (
        DATA, "        return batch\n", '        return batch | {"labels": batch["input_ids"].clone()}\n',
        "tests/test_data.py", "test_labels_are_the_next_tokens",
    ),
    "a mean of the micro-batch": (
        MODULE, 'batch["tokens_per_micro_batch"]', f"({MASK} != -100).sum()",
        "tests/test_two_ranks.py", "test_training_does_not_depend_on_how_a_batch_is_distributed[one big batch]",
    ),
    "a loss that does not reach the model": (
        MODULE, "        return cross_entropy\n", "        return cross_entropy.detach().requires_grad_()\n",
        "tests/test_model.py", "test_every_trainable_parameter_gets_a_gradient",
    ),
    "a loss with the wrong sign": (
        MODULE, "        return cross_entropy\n", "        return -cross_entropy\n",
        "tests/test_model.py", "test_the_initial_loss_is_that_of_a_uniform_guess",
    ),
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(SOURCE / "configs", tmp_path / "configs")
    shutil.copytree(SOURCE / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    package = SOURCE / "{{cookiecutter.package_name}}"
    shutil.copytree(package, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run_tests(project: Path, selection: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={project}"]
    environment = os.environ | {
        "PYTHONPATH": f"{project}{os.pathsep}{os.environ['PYTHONPATH']}",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [*command, *selection.split()], cwd=project, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.nightly  # `make test` runs them in a generated project
def test_they_pass_as_they_are(project: Path) -> None:
    ended = run_tests(project, "tests --deselect tests/test_rehearse.py")
    assert ended.returncode == 0, ended.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("edit", tiers(EDITS, daily=["labels that are not shifted"]))
def test_they_find_what_an_edit_breaks(edit: str, project: Path) -> None:
    name, old, new, selection, failing = EDITS[edit]
    text = (project / name).read_text(encoding="utf-8")
    assert old in text
    (project / name).write_text(text.replace(old, new), encoding="utf-8")
    ended = run_tests(project, selection)
    assert ended.returncode == 1 and f"::{failing}" in ended.stdout, ended.stdout[-3000:]
