"""The tests that ship pass in a fresh project, and find what a user's edit breaks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dist_template import Project
from dist_template.testing import project_checks
from tests.support.tiers import tiers

from .conftest import copied_project, run

PACKAGE = "trainer_dev"
MODULE, DATA = f"{PACKAGE}/module.py", f"{PACKAGE}/data.py"
MASK = 'batch["labels"]'

# What a user did wrong: file, text there, text in its place, the check that must fail, its
# sentence.
EDITS = {
    "a misspelt key": ("configs/cluster.yaml", "precision: bf16-mixed", "precison: bf16-mixed",
        "a_configuration_can_be_added-cluster", "precison"),
    "labels that are not shifted": (DATA, "        return batch\n",
        '        return batch | {"labels": batch["input_ids"].clone()}\n',
        "labels_are_the_next_tokens", "labels are not the next token"),
    "a mean of the micro-batch": (MODULE, 'batch["tokens_per_micro_batch"]',
        f"({MASK} != -100).sum()", "two_ranks_train_as-one_big_batch",
        "'accumulation = one big batch'"),
    "a loss that does not reach the model": (MODULE, "        return cross_entropy\n",
        "        return cross_entropy.detach().requires_grad_()\n",
        "every_trainable_parameter_gets_a_gradient", "trainable parameters get no gradient"),
    "a loss with the wrong sign": (MODULE, "        return cross_entropy\n",
        "        return -cross_entropy\n", "the_initial_loss_is_that_of_a_uniform_guess",
        "a uniform guess has"),
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return copied_project(tmp_path)


def run_tests(project: Path, selection: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    command += [f"--rootdir={project}", *selection]
    path = f"{project}{os.pathsep}{os.environ['PYTHONPATH']}"
    return run(*command, cwd=project, PYTHONPATH=path, OMP_NUM_THREADS="1")


@pytest.mark.slow
@pytest.mark.nightly  # `make test` runs them in a generated project
def test_they_pass_as_they_are(project: Path) -> None:
    ended = run_tests(project, ["-m", "not slow"])
    assert ended.returncode == 0, ended.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("edit", tiers(EDITS, daily=["labels that are not shifted"]))
def test_they_find_what_an_edit_breaks(edit: str, project: Path) -> None:
    name, old, new, check, words = EDITS[edit]
    text = (project / name).read_text(encoding="utf-8")
    assert old in text
    (project / name).write_text(text.replace(old, new), encoding="utf-8")
    ended = run_tests(project, [f"tests/test_project.py::test_project[{check}]"])
    summary = ended.stdout.partition("short test summary")[2]
    assert ended.returncode == 1 and f"::test_project[{check}]" in summary, ended.stdout[-3000:]
    assert words in ended.stdout, ended.stdout[-3000:]


def test_a_check_is_skipped_by_its_name_alone() -> None:
    project = Project(PACKAGE)
    checks = project_checks(project, skip={"labels_are_the_next_tokens": "pixels"})
    marks = {param.id: [mark.name for mark in param.marks] for param in checks.args[1]}
    assert {name for name, found in marks.items() if found == ["skip"]} == {
        "labels_are_the_next_tokens"
    }
    slow = {f"a_sharded_strategy_passes_every_check-{name}" for name in ("fsdp2", "zero3")}
    assert {name for name, found in marks.items() if found == ["slow"]} == slow
    with pytest.raises(ValueError, match="'labels'.*one_batch_can_be_overfitted"):
        project_checks(project, skip={"labels": "pixels"})
