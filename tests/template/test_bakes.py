"""Every answer gives a valid project; the tests that ship find what a user's edit breaks."""

import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

from dist_template import Project
from dist_template.testing import project_checks
from tests.support.tiers import tiers

from .conftest import (
    PACKAGE,
    ROOT,
    SOURCE,
    BakedProject,
    assert_valid,
    bake_into,
    copied_project,
    edit,
    output,
    run,
)

CI = {"GitHub": ".github/workflows/ci.yml", "GitLab": ".gitlab-ci.yml", "None": None}
LICENSES = [  # licence, words of its text, CI
    ("MIT", "Permission is hereby granted, free of charge", "None"),
    ("Apache-2.0", "Version 2.0, January 2004", "GitLab"),
    ("BSD-3-Clause", "Redistribution and use in source and binary forms", "GitHub"),
    ("None", "", "GitHub"),
]


def test_default_project_is_valid_lints_and_type_checks_clean(default: BakedProject) -> None:
    assert_valid(default)
    assert default.path.name == "my-trainer" and default.package == "my_trainer"
    for tool in (["ruff", "check", "--no-cache"], ["ty", "check", "--python", sys.prefix]):
        output(sys.executable, "-m", *tool, default.package, cwd=default.path)


@pytest.mark.parametrize(("license", "words", "ci"), LICENSES)
def test_licence_and_ci_are_what_was_asked_for_and_nothing_else(
    default: BakedProject, tmp_path: Path, license: str, words: str, ci: str
) -> None:
    project = bake_into(tmp_path, license=license, ci=ci, author="Ada Lovelace")
    assert_valid(project)
    python = {name: text for name, text in default.contents.items() if name.endswith(".py")}
    assert python.items() <= project.contents.items(), "what was linted and type-checked once"
    licences = [project.read(name) for name in project.files if "LICENSE" in name]
    assert len(licences) == (license != "None")
    for text in licences:
        assert words in text and "Copyright" in text and "Ada Lovelace" in text
    declared = tomllib.loads(project.read("pyproject.toml"))["project"]["license"]
    assert declared == ("LicenseRef-Proprietary" if license == "None" else license)
    assert {path for path in CI.values() if path in project.files} == {CI[ci]} - {None}
    assert (project.path / ".github").exists() == (ci == "GitHub")


def test_generating_over_a_project_changes_nothing(default: BakedProject, tmp_path: Path) -> None:
    first = bake_into(tmp_path)
    assert first.contents == default.contents, "the same answers give the same bytes"
    command = ["cookiecutter", str(ROOT), "--no-input", "--default-config", "-f", "-o", "."]
    printed = output(sys.executable, "-m", *command, cwd=tmp_path)
    assert first.contents == default.contents
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    assert lines[-3:] == ["cd my-trainer", "make setup", "make train"]


def test_a_git_archive_gives_the_same_project_as_the_checkout(
    default: BakedProject, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "archive.zip"
    output("git", "archive", "--prefix=template/", "-o", str(archive), "v1", cwd=repository)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where cookiecutter unpacks it
    assert bake_into(tmp_path / "bakes", archive).contents == default.contents


def test_caches_of_a_used_checkout_are_left_behind(default: BakedProject, tmp_path: Path) -> None:
    used = tmp_path / "used"
    for name in (SOURCE.name, "hooks"):
        shutil.copytree(ROOT / name, used / name)
    shutil.copy(ROOT / "cookiecutter.json", used)
    for folder in (".", PACKAGE.name, "configs"):
        for name in ("__pycache__", ".ruff_cache", ".pytest_cache"):
            cache = used / SOURCE.name / folder / name
            cache.mkdir(exist_ok=True)
            (cache / "binary").write_bytes(b"text, and then not: \x8f\xff{{ nobody }}")
    assert bake_into(tmp_path / "bakes", used).contents == default.contents


MODULE, DATA = "trainer_dev/module.py", "trainer_dev/data.py"
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
    project, skipped = Project("trainer_dev"), "labels_are_the_next_tokens"
    checks = project_checks(project, skip={skipped: "pixels"})
    marks = {param.id: mark.name for param in checks.args[1] for mark in param.marks}
    slow = {f"a_sharded_strategy_passes_every_check-{name}": "slow" for name in ("fsdp2", "zero3")}
    assert marks == {skipped: "skip"} | slow
    with pytest.raises(ValueError, match="'labels'.*one_batch_can_be_overfitted"):
        project_checks(project, skip={"labels": "pixels"})
