"""The tests that ship find what a user's edit breaks; `make test` runs them in a fresh project."""

import os
import sys
from pathlib import Path

import pytest

from dist_template import Project
from dist_template.testing import project_checks
from tests.support.tiers import tiers

from .conftest import copied_project, edit, run

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


@pytest.mark.slow
@pytest.mark.parametrize("case", tiers(EDITS, daily=["labels that are not shifted"]))
def test_they_find_what_an_edit_breaks(case: str, tmp_path: Path) -> None:
    name, old, new, check, words = EDITS[case]
    project = copied_project(tmp_path)
    edit(project / name, old, new)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    command += [f"--rootdir={project}", f"tests/test_project.py::test_project[{check}]"]
    path = f"{project}{os.pathsep}{os.environ['PYTHONPATH']}"
    printed = run(*command, cwd=project, PYTHONPATH=path).stdout
    summary = printed.partition("short test summary")[2]
    assert f"FAILED tests/test_project.py::test_project[{check}]" in summary, printed[-3000:]
    assert words in printed, printed[-3000:]


def test_a_check_is_skipped_by_its_name_alone() -> None:
    project, skipped = Project(PACKAGE), "labels_are_the_next_tokens"
    checks = project_checks(project, skip={skipped: "pixels"})
    marks = {param.id: mark.name for param in checks.args[1] for mark in param.marks}
    slow = {f"a_sharded_strategy_passes_every_check-{name}": "slow" for name in ("fsdp2", "zero3")}
    assert marks == {skipped: "skip"} | slow
    with pytest.raises(ValueError, match="'labels'.*one_batch_can_be_overfitted"):
        project_checks(project, skip={"labels": "pixels"})
