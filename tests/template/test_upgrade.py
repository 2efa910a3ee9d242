"""`make upgrade` of a project that its user has edited: nothing of the user's is lost, conflicts are git's."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dist_template import Project
from tests.support.commits import commit, git, somebody  # noqa: F401  (a fixture)
from tests.support.library import read_metrics
from tests.support.line import main
from tests.support.runs import SENTENCES, SMALL_LLAMA

from .conftest import OUTER, ROOT, BakedProject, bake_from, bake_into

VERSION = json.loads((ROOT / "cookiecutter.json").read_text())["_version"]
MAJOR, MINOR = (int(number) for number in VERSION.split(".")[:2])
NEXT = f"{MAJOR}.{MINOR + 1}.0"
MINE = '''

class Repeated(Source):
    """My own source.

    Args:
        text: What is repeated.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def documents(self) -> Iterator[tuple[str, str]]:
        for number in range(60):
            yield f"{number}", f"{number}: " + self.text * (4 + number % 5)
'''
CONFIG = f"""\
# My own configuration
run: {{name: mine, plotly: inline, report: false}}   # the page has everything
data: {{source: {{class_path: Repeated, init_args: {{text: "{SENTENCES.strip()}"}}}}, tokenizer: Bytes, seq_len: 32}}
model: {{architecture: {SMALL_LLAMA}, sample_tokens: 4, optim: {{warmup: 0}}}}
trainer: {{accelerator: cpu, devices: 1, max_steps: 6, log_every_n_steps: 1, val_check_interval: 6}}
last_checkpoint: {{every_n_steps: 3, keep: 3}}
"""


def edit(path: Path, old: str, new: str) -> None:
    """Replaces a text that the file has."""
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{path} has no {old!r}"
    path.write_text(text.replace(old, new), encoding="utf-8")


def started(*command: str, cwd: Path, library: Path) -> subprocess.CompletedProcess[str]:
    """A command with the library of a template's folder, as if it were installed."""
    env = {key: value for key, value in os.environ.items() if key not in OUTER}
    env |= {"PYTHONPATH": str(library / "src"), "OMP_NUM_THREADS": "1", "GIT_EDITOR": "true"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.fixture
def template(repository: Path, tmp_path: Path) -> Path:
    """A repository of its own of the present tree, released."""
    folder = tmp_path / "template"
    shutil.copytree(repository, folder)
    git(folder, "tag", f"v{VERSION}")
    return folder


def release_next(template: Path) -> None:
    """Commits the next version: two conflicts with `edit_as_user`, a new, a removed, changed files."""
    project = template / "{{cookiecutter.project_slug}}"
    for name in ("cookiecutter.json", "pyproject.toml"):
        edit(template / name, f'"{VERSION}"', f'"{NEXT}"')
    edit(project / "Makefile", "STRATEGY ?= fsdp2", "STRATEGY ?= zero3")
    edit(project / "README.md", "You edit the model, the data and YAML.", "You edit only the model, the data and YAML.")
    edit(project / "configs" / "pretrain.yaml", "run:\n", "# News of the template.\nrun:\n")
    (project / "configs" / "news.yaml").write_text("trainer: {max_steps: 2}\n")
    (project / "configs" / "finetune.yaml").unlink()
    commit(template, f"Release {NEXT}")
    git(template, "tag", f"v{NEXT}")


def edit_as_user(project: Path) -> None:
    """Edits what a user owns, and commits the project only then."""
    edit(project / "Makefile", "STRATEGY ?= fsdp2", "STRATEGY ?= ddp")
    with (project / "Makefile").open("a") as file:
        file.write("\nmine:  ## my own command\n\t@echo mine\n")
    edit(project / "README.md", "You edit the model, the data and YAML.", "We edit the model.")
    edit(project / "configs" / "quickstart.yaml", "max_steps: 300", "max_steps: 299")
    (project / "configs" / "mine.yaml").write_text(CONFIG)
    with (project / "my_trainer" / "data.py").open("a") as file:
        file.write(MINE)
    forward = "    def configure_callbacks("
    edit(project / "my_trainer" / "module.py", forward, f"    mine = 'an attribute of my own'\n\n{forward}")
    git(project, "init", "-q", "-b", "main")
    commit(project, "My project")


EDITS = {
    "Makefile": "\nmine:  ## my own command\n",
    "README.md": "We edit the model.",
    "configs/quickstart.yaml": "max_steps: 299",
    "configs/mine.yaml": "# My own configuration",
    "my_trainer/data.py": MINE,
    "my_trainer/module.py": "mine = 'an attribute of my own'",
}


@pytest.mark.slow
def test_an_edited_project_is_upgraded_and_its_checkpoint_resumes_exactly(template: Path, tmp_path: Path) -> None:
    project = bake_from(f"git+file://localhost{template}", tmp_path, f"v{VERSION}").path
    edit_as_user(project)
    old = tmp_path / "old"
    shutil.copytree(template, old)
    fit = [sys.executable, "-m", "my_trainer", "fit", "--config", "configs/mine.yaml"]
    done = started(*fit, cwd=project, library=old)
    assert done.returncode == 0, done.stdout + done.stderr
    (whole,) = (project / "runs" / "mine").iterdir()

    release_next(template)
    done = started("make", "upgrade", f"RUN={sys.executable}", "TRUST=1", cwd=project, library=old)
    assert done.returncode and "error: upgraded from" in done.stderr, done.stdout + done.stderr
    assert git(project, "diff", "--name-only", "--diff-filter=U").split() == ["Makefile", "README.md"]
    for name in ("Makefile", "README.md"):
        assert (project / name).read_text().count("<<<<<<<") == 1
    assert [name for name in EDITS if EDITS[name] not in (project / name).read_text()] == []
    assert not list(project.rglob("*.rej")) and not (project / "configs/finetune.yaml").exists()
    assert (project / "configs/news.yaml").exists()
    assert "# News of the template." in (project / "configs/pretrain.yaml").read_text()
    assert f'template@v{NEXT}"' in (project / "pyproject.toml").read_text()

    git(project, "checkout", "--ours", "Makefile")
    git(project, "checkout", "--theirs", "README.md")
    git(project, "add", "Makefile", "README.md")
    done = started("git", "cherry-pick", "--continue", cwd=project, library=template)
    assert done.returncode == 0 and not git(project, "status", "--porcelain"), done.stderr
    done = started("make", "upgrade", f"RUN={sys.executable}", "TRUST=1", cwd=project, library=template)
    assert done.returncode == 0 and "nothing to upgrade" in done.stdout, done.stdout + done.stderr

    tests = ["-m", "pytest", "-q", "-m", "not slow", "tests/test_project.py", "-k", "configuration or next"]
    done = started(sys.executable, *tests, cwd=project, library=template)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
    resumed = ["--run.name", "resumed", "--ckpt_path", str(whole / "checkpoints" / "step00000003.ckpt")]
    done = started(*fit, *resumed, cwd=project, library=template)
    assert done.returncode == 0, done.stdout + done.stderr
    (again,) = (project / "runs" / "resumed").iterdir()
    for name in ("train/loss", "eval/loss"):
        series = [read_metrics(run)[name] for run in (whole, again)]
        before, after = (dict(zip(one.steps.tolist(), one.values.tolist(), strict=True)) for one in series)
        shared = [step for step in before if step > 3]
        assert shared and {step: before[step] for step in shared} == {step: after[step] for step in shared}, name


# ---- a template's folder, an archive, a project in a larger repository ---------------------------------------------


def upgraded(project: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    """`python -m <package> upgrade` in this process."""
    monkeypatch.setattr(Project, "folder", project / "my_trainer")
    return main(["upgrade", "--trust", *flags])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "inside a repository"])
def test_without_conflicts_there_is_one_commit(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    project = bake_into(tmp_path / "out", template).path
    outer = project.parent if kind == "inside a repository" else project
    (outer / "mine.txt").write_text("mine\n")
    git(outer, "init", "-q", "-b", "main")
    commit(outer, "My project")
    release_next(template)
    assert upgraded(project, monkeypatch) == 0
    fresh = bake_into(tmp_path / "fresh", template)
    names = {*git(project, "ls-files").splitlines()} - {"mine.txt"}
    assert names == {*fresh.files} and BakedProject(project, "my_trainer").read("README.md") == fresh.read("README.md")
    assert (outer / "mine.txt").exists() and not git(outer, "status", "--porcelain")
    assert len(git(outer, "log", "--oneline").splitlines()) == 2
    git(outer, "revert", "--no-edit", "HEAD")
    assert (project / "configs/finetune.yaml").exists()


def test_what_cannot_be_upgraded_is_refused_and_left_as_it_is(
    default: BakedProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    project, record = tmp_path / "project", tmp_path / "project" / ".cruft.json"
    shutil.copytree(default.path, project)

    def refusal(*flags: str) -> str:
        assert upgraded(project, monkeypatch, *flags) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1, error
        return error

    assert "`git cat-file -e` fails: fatal: not a git repository" in refusal()
    git(project, "init", "-q")
    commit(project, "My project")
    (project / "README.md").write_text("edited")
    assert "README.md has uncommitted changes: commit or stash them" in refusal()
    git(project, "checkout", "README.md")
    text = record.read_text()
    for change, sentence in {
        '"template": ""': "cannot be read: it has no template, commit or answers",
        '"template": "/nowhere"': "error: `git clone --quiet -- /nowhere` fails: fatal: repository",
        '"template": "http://127.0.0.1:9/a.git"': "a.git` fails: fatal: unable to access",
    }.items():
        record.write_text(re.sub('"template": ".*"', change, text))
        commit(project, "another template")
        assert sentence in refusal()
    record.write_text(re.sub('"commit": .*,', '"commit": "abc",', text))
    commit(project, "another commit")
    assert "has no abc: edit .cruft.json, or give another TO" in refusal()
    head = git(project, "rev-parse", "HEAD")
    monkeypatch.setitem(sys.modules, "cookiecutter", None)
    assert "upgrade needs the package cookiecutter: pip install 'dist-template[upgrade]'" in refusal()
    assert git(project, "rev-parse", "HEAD") == head and not git(project, "status", "--porcelain")


@pytest.mark.slow
def test_the_library_runs_the_project_of_the_newest_release(tmp_path: Path) -> None:
    tags = subprocess.run(["git", "tag", "--list", "v*.*.*", "--sort=-version:refname"], cwd=ROOT, capture_output=True)
    if tags.returncode or not tags.stdout.split():
        pytest.skip("this checkout has no tag of a release")
    project = bake_from(f"git+file://localhost{ROOT}", tmp_path, tags.stdout.decode().split()[0]).path
    edit_as_user(project)
    fit = [sys.executable, "-m", "my_trainer", "fit", "--config", "configs/mine.yaml", "--trainer.max_steps=2"]
    done = started(*fit, cwd=project, library=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
