"""Answers work or are refused; each gives a valid project, whose tests find what an edit breaks."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from cookiecutter.exceptions import UndefinedVariableInTemplate
from jinja2 import Template
from jinja2.exceptions import UndefinedError

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

HOOK = (ROOT / "hooks" / "pre_gen_project.py").read_text("utf-8")
WORK = {
    "quotes": """Bob's "best" 'model' '''; import os; '''\"\"\" C:\\new\\table { b \\""",
    "unicode": "深度学习 Rocket 🚀 trainer 👩‍🚀 Ünïcødé modèle",
    "shell and markup": "$(touch owned) `touch owned` ; <b>*bold*</b> & # [x](y) -- | :",
    "200 characters": "long name " * 20,
}


@pytest.mark.parametrize("name", WORK.values(), ids=WORK.keys())
def test_hostile_text_is_only_text(tmp_path: Path, name: str) -> None:
    project = bake_into(tmp_path, project_name=name, description=name, author=name)
    assert_valid(project)
    assert project.package.isidentifier()
    metadata = tomllib.loads(project.read("pyproject.toml"))["project"]
    assert metadata["description"] == name and metadata["authors"] == [{"name": name}]
    assert project.read("README.md").startswith(f"# {name}\n")
    assert not list(tmp_path.rglob("owned"))


BAD_PACKAGES = """
    two-words 1st naïve class match json Test torch Lightning yaml datasets configs a/b ..
    __init__ 模型""".split()
BAD_PACKAGES += ["", "two words", "a" * 61, "x; import os", "x\nimport os", "{x}", "'''", '"""']
BAD_SLUGS = """.hidden -rf end- torch 深度 back\\slash quo"te $HOME {x}""".split()
BAD_SLUGS += ["two words", "new\nline"]
BAD_TEXTS = ["two\nlines", "tab\there", "bell\a", "sep\u2028arator", "x" * 301, " "]
TEXTS = ("project_name", "description", "author")
REFUSED = {"package_name": BAD_PACKAGES, "project_slug": BAD_SLUGS} | dict.fromkeys(
    TEXTS, BAD_TEXTS
)


@pytest.mark.parametrize("key", REFUSED)
def test_the_hook_refuses_a_bad_answer_in_one_sentence(key: str) -> None:
    for text in REFUSED[key]:
        answers = dict.fromkeys(REFUSED, "fine") | {key: text}
        with pytest.raises(SystemExit, match=f"^{key} .*; give another {key}\\.$") as ended:
            exec(Template(HOOK).render(cookiecutter=answers), {})
        assert "\n" not in str(ended.value), text


def test_a_refusal_on_the_command_line_exits_with_1_and_leaves_nothing(tmp_path: Path) -> None:
    command = ["cookiecutter", str(ROOT), "--no-input", "--default-config", "-o", "out"]
    done = run(sys.executable, "-m", *command, "project_name=2 towers", cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "package_name '2_towers' must be a Python identifier" in done.stderr
    assert not [*tmp_path.glob("out/*")]


SLUG = (UndefinedError, "project_slug must be one folder name")
REFUSED_BEFORE_A_FOLDER = [
    *((*SLUG, {"project_slug": slug}) for slug in ("", "a/b", "../up", "/tmp/x", "a" * 61)),
    (*SLUG, {"project_name": "🚀🚀"}),
    # cookiecutter renders answers given with --no-input: an unknown name in them stops it
    (UndefinedVariableInTemplate, "project_name", {"project_name": "{{ braces }}"}),
]


@pytest.mark.parametrize(("error", "words", "answers"), REFUSED_BEFORE_A_FOLDER)
def test_some_answers_are_refused_before_a_folder_is_made(
    tmp_path: Path, error: type[Exception], words: str, answers: dict[str, str]
) -> None:
    with pytest.raises(error, match=words):
        bake_into(tmp_path / "bakes", **answers)
    assert not (tmp_path / "bakes").exists()


def test_braces_typed_at_the_prompt_stay_text(tmp_path: Path) -> None:
    """The command line, with answers on stdin: what is typed is not rendered."""
    name = "a {{ 7 * 7 }} {% raw %} b"
    typed = f"{name}\nbraces\nbraces\n{name}\n{name}\n1\n1\n"
    command = [sys.executable, "-m", "cookiecutter", str(ROOT), "--default-config", "-o", "."]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    metadata = tomllib.loads((tmp_path / "braces" / "pyproject.toml").read_text())["project"]
    assert metadata["description"] == name and metadata["authors"] == [{"name": name}]


def test_the_list_of_dependencies_in_the_hook_is_complete() -> None:
    (words,) = re.findall('DEPENDENCIES = set.*?"""(.*?)"""', HOOK, re.DOTALL)
    listed = set(words.split())
    pins = re.findall(r"(?m)^([\w.-]+)==", (SOURCE / "lock-cpu.txt").read_text())
    pinned = {re.sub(r"[-_.]+", "_", name).lower() for name in pins}
    imports = set[str]()
    for module, owners in importlib.metadata.packages_distributions().items():
        is_pinned = pinned & {re.sub(r"[-_.]+", "_", owner).lower() for owner in owners}
        if is_pinned and module.isidentifier() and "__" not in module:
            imports.add(module.lower())
    assert (pinned | imports) - listed == set()


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


# What a user owns, and reads. A new file here is a decision: docs/decisions/template.md.
PROJECT = """
.cruft.json .dockerignore .github/workflows/ci.yml .gitignore Dockerfile LICENSE Makefile README.md
configs/cluster.yaml configs/finetune.yaml configs/pretrain.yaml configs/quickstart.yaml
environment.py launch/slurm.sh launch/torchrun.sh lock-cpu.txt lock-cuda.txt
my_trainer/__init__.py my_trainer/__main__.py my_trainer/data.py my_trainer/module.py
pyproject.toml tests/test_project.py
"""


def test_a_project_contains_these_files(default: BakedProject) -> None:
    assert [*default.files] == sorted(PROJECT.split())


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
def test_the_projects_tests_find_what_an_edit_breaks(case: str, tmp_path: Path) -> None:
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
