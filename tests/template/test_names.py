"""Answers that people come up with work, or are refused in one sentence that names the answer."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cookiecutter.exceptions import UndefinedVariableInTemplate
from jinja2 import Template
from jinja2.exceptions import UndefinedError

from .conftest import ROOT, SOURCE, assert_valid, bake_into, run

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
    (words,) = re.findall('"""\n(_distutils_hack.*?)"""', HOOK, re.DOTALL)
    listed = set(words.split())
    pins = re.findall(r"(?m)^([\w.-]+)==", (SOURCE / "lock-cpu.txt").read_text())
    pinned = {re.sub(r"[-_.]+", "_", name).lower() for name in pins}
    imports = set[str]()
    for module, owners in importlib.metadata.packages_distributions().items():
        is_pinned = pinned & {re.sub(r"[-_.]+", "_", owner).lower() for owner in owners}
        if is_pinned and module.isidentifier() and "__" not in module:
            imports.add(module.lower())
    assert (pinned | imports) - listed == set()
