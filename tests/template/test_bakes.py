"""Every combination of answers gives a project whose files are valid and whose Python is clean."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from .conftest import PACKAGE, ROOT, SOURCE, Bake, BakedProject, assert_valid, bake_into, run

LICENSES = {
    "MIT": "Permission is hereby granted, free of charge",
    "Apache-2.0": "Version 2.0, January 2004",
    "BSD-3-Clause": "Redistribution and use in source and binary forms",
    "None": None,
}
CI = {"GitHub": ".github/workflows/ci.yml", "GitLab": ".gitlab-ci.yml", "None": None}


def test_default_project_is_valid_lints_and_type_checks_clean(default: BakedProject) -> None:
    assert_valid(default)
    assert default.path.name == "my-trainer" and default.package == "my_trainer"
    for tool in (["ruff", "check", "--no-cache"], ["ty", "check", "--python", sys.prefix]):
        done = run(sys.executable, "-m", *tool, default.package, cwd=default.path)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("license", "ci"), list(itertools.product(LICENSES, CI)))
def test_licence_and_ci_are_what_was_asked_for_and_nothing_else(
    bake: Bake, default: BakedProject, license: str, ci: str
) -> None:
    project = bake(license=license, ci=ci, author="Ada Lovelace")
    assert_valid(project)
    python = {name: digest for name, digest in default.digests.items() if name.endswith(".py")}
    assert python.items() <= project.digests.items(), "what was linted and type-checked once"
    licences = [name for name in project.files if "LICENSE" in name]
    assert licences == ["LICENSE"] * (license != "None")
    if words := LICENSES[license]:
        assert words in project.read("LICENSE") and "Copyright" in project.read("LICENSE")
        assert "Ada Lovelace" in project.read("LICENSE")
    declared = tomllib.loads(project.read("pyproject.toml"))["project"]["license"]
    assert declared == ("LicenseRef-Proprietary" if license == "None" else license)
    assert {path for path in CI.values() if path in project.files} == {CI[ci]} - {None}
    assert (project.path / ".github").exists() == (ci == "GitHub")


def test_generating_over_a_project_changes_nothing(default: BakedProject, tmp_path: Path) -> None:
    first = bake_into(tmp_path)
    assert first.digests == default.digests, "the same answers give the same bytes"
    command = ["cookiecutter", str(ROOT), "--no-input", "--default-config", "-f", "-o", "."]
    done = run(sys.executable, "-m", *command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert first.digests == default.digests
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    assert lines[-3:] == ["cd my-trainer", "make setup", "make train"]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_git_archive_gives_the_same_project_as_the_checkout(
    default: BakedProject, repository: Path, tmp_path: Path, kind: str, monkeypatch: Any
) -> None:
    archive, folder = tmp_path / f"archive.{kind}", tmp_path / "archive"
    folder.mkdir()
    command = ["git", "archive", "--prefix=template/", "-o", str(archive), "v1"]
    assert run(*command, cwd=repository).returncode == 0
    if kind == "zip":
        monkeypatch.setenv("TMPDIR", str(tmp_path))  # where cookiecutter unpacks it
        monkeypatch.setattr(tempfile, "tempdir", None)
    else:
        assert run("tar", "-xf", str(archive), cwd=folder).returncode == 0
    project = bake_into(tmp_path / "bakes", archive if kind == "zip" else folder / "template")
    assert project.digests == default.digests


def test_caches_of_a_used_checkout_are_left_behind(default: BakedProject, tmp_path: Path) -> None:
    used = tmp_path / "used"
    shutil.copytree(SOURCE, used / SOURCE.name)
    shutil.copytree(ROOT / "hooks", used / "hooks")
    shutil.copy(ROOT / "cookiecutter.json", used)
    inner = used / SOURCE.name
    for folder in (inner, inner / PACKAGE.name, inner / "configs"):
        for cache in ("__pycache__", ".ruff_cache", ".pytest_cache"):
            (folder / cache).mkdir(exist_ok=True)
            (folder / cache / "binary").write_bytes(b"text, and then not: \x8f\xff{{ nobody }}")
    assert bake_into(tmp_path / "bakes", used).digests == default.digests


def test_an_unknown_licence_is_refused(bake: Bake) -> None:
    with pytest.raises(ValueError, match="GPL.*license.*MIT"):
        bake(license="GPL")


def test_every_question_has_words_for_people() -> None:
    context = json.loads((ROOT / "cookiecutter.json").read_text())
    asked = {key for key in context if not key.startswith("_")}
    assert set(context["__prompts__"]) == asked
    for key in asked:
        if isinstance(context[key], list):
            assert set(context["__prompts__"][key]) == {"__prompt__", *context[key]}
