"""Answers that people come up with work, or are refused in one sentence that names the answer."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cookiecutter.exceptions import FailedHookException, UndefinedVariableInTemplate
from jinja2.exceptions import UndefinedError

from .conftest import ROOT, SOURCE, Bake, assert_valid, bake_into, run

WORK = {
    "quotes": """Bob's "best" 'model'""",
    "triple quotes": "'''; import os; '''\"\"\"",
    "backslashes": "C:\\new\\table \\", "one brace": "a { b } c", "chinese": "深度学习 trainer",
    "emoji": "Rocket 🚀 trainer 👩‍🚀",
    "markup": "<b>*bold*</b> & `code` # [x](y) -- | :",
    "shell": "$(touch owned) `touch owned` ; touch owned",
    "200 characters": "long name " * 20, "accents": "Ünïcødé modèle",
}  # fmt: skip
REFUSED_PACKAGES = """
    two-words 1st naïve class match json Test torch Lightning yaml datasets configs a/b ..
    __init__ 模型""".split()
REFUSED_PACKAGES += ["", "two words", "a" * 61, "x; import os", "x\nimport os", "{x}", "'''", '"""']
REFUSED_SLUGS = """.hidden -rf end- torch 深度 back\\slash quo"te $HOME {x}""".split()
REFUSED_SLUGS += ["two words", "new\nline"]
REFUSED_BEFORE_A_FOLDER = ["", "a/b", "../up", "/tmp/absolute", "a" * 61, "深" * 100]


@pytest.mark.parametrize("name", WORK.values(), ids=WORK.keys())
def test_hostile_text_is_only_text(bake: Bake, tmp_path: Path, name: str) -> None:
    project = bake(project_name=name, description=name, author=name)
    assert_valid(project)
    metadata = tomllib.loads(project.read("pyproject.toml"))["project"]
    assert metadata["description"] == name and metadata["authors"] == [{"name": name}]
    assert project.read("README.md").startswith(f"# {name}\n")
    assert not list(tmp_path.rglob("owned"))


@pytest.mark.parametrize("name", ["My Model 2", "2 towers", "under_score", "dots.and-dashes"])
def test_derived_names_are_valid_or_refused_by_name(
    bake: Bake, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    try:
        project = bake(project_name=name)
    except FailedHookException:
        assert "give another package_name" in capfd.readouterr().err
    else:
        assert project.package.isidentifier()


BAD_TEXTS = ["two\nlines", "tab\there", "bell\a", "sep\u2028arator", "x" * 301, " "]
REFUSED: list[tuple[str, str]] = [("package_name", name) for name in REFUSED_PACKAGES]
REFUSED += [("project_slug", name) for name in REFUSED_SLUGS]
for key in ("project_name", "description", "author"):
    REFUSED += [(key, text) for text in BAD_TEXTS]


@pytest.mark.parametrize(("key", "text"), REFUSED)
def test_a_bad_answer_is_refused(tmp_path: Path, capfd: Any, key: str, text: str) -> None:
    """In one sentence that names it; nothing is left in the folder."""
    folder = tmp_path / "bakes"
    folder.mkdir()
    others = {} if key in ("project_name", "description", "author") else {"package_name": "fine"}
    with pytest.raises(FailedHookException):
        bake_into(folder, **{"project_slug": "fine", **others, key: text})
    assert list(folder.iterdir()) == []
    message = capfd.readouterr().err.strip()
    assert len(message.splitlines()) == 1 and "Traceback" not in message
    assert message.startswith(f"{key} ")


@pytest.mark.parametrize("slug", REFUSED_BEFORE_A_FOLDER)
def test_slug_that_is_no_folder_is_refused_before_one_is_made(tmp_path: Path, slug: str) -> None:
    with pytest.raises(UndefinedError, match="project_slug must be one folder name"):
        bake_into(tmp_path / "bakes", project_slug=slug, package_name="fine")
    assert not (tmp_path / "bakes").exists()


def test_a_name_of_emoji_alone_asks_for_a_slug(tmp_path: Path) -> None:
    with pytest.raises(UndefinedError, match="project_slug must be one folder name"):
        bake_into(tmp_path / "bakes", project_name="🚀🚀")
    made = bake_into(tmp_path / "bakes", project_name="🚀🚀", project_slug="rocket")
    assert made.package == "rocket"


def test_braces_that_cookiecutter_would_evaluate_are_refused(tmp_path: Path) -> None:
    """cookiecutter renders answers given with --no-input: an unknown name in them stops it."""
    with pytest.raises(UndefinedVariableInTemplate, match="project_name"):
        bake_into(tmp_path / "bakes", project_name="{{ braces }}")
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


def test_a_refusal_on_the_command_line_exits_with_1_and_leaves_nothing(tmp_path: Path) -> None:
    command = ["cookiecutter", str(ROOT), "--no-input", "--default-config", "-o", "out"]
    done = run(sys.executable, "-m", *command, "package_name=torch", cwd=tmp_path)
    assert done.returncode == 1
    assert "package_name 'torch' is the name of a package that the project needs" in done.stderr
    assert not [*tmp_path.glob("out/*")]


def test_the_list_of_dependencies_in_the_hook_is_complete() -> None:
    tree = ast.parse((ROOT / "hooks" / "pre_gen_project.py").read_text())
    texts = [str(node.value).split() for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    listed = set(next(words for words in texts if "lightning" in words))
    pins = re.findall(r"(?m)^([\w.-]+)==", (SOURCE / "lock-cpu.txt").read_text())
    pinned = {re.sub(r"[-_.]+", "_", name).lower() for name in pins}
    imports = set[str]()
    for module, owners in importlib.metadata.packages_distributions().items():
        is_pinned = pinned & {re.sub(r"[-_.]+", "_", owner).lower() for owner in owners}
        if is_pinned and module.isidentifier() and "__" not in module:
            imports.add(module.lower())
    assert (pinned | imports) - listed == set()
