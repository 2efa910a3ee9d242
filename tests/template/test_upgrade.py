"""`make upgrade` of a project that its user has edited: no edit is lost, conflicts are git's."""

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
from dist_template.cli.config_file import locate
from tests.support.commits import commit, git, somebody  # noqa: F401  (a fixture)
from tests.support.library import read_metrics
from tests.support.line import main
from tests.support.runs import SMALL_LLAMA

from .conftest import OUTER, ROOT, BakedProject, bake_from, bake_into

Captured = pytest.CaptureFixture[str]
VERSION = json.loads((ROOT / "cookiecutter.json").read_text())["_version"]
NEXT = "99.0.0"
OLD = "98b5c5d090ece3c983a37886898fcdf40f615931"  # the last commit whose projects have 56 files
MINE = '''

class Repeated(Source):
    """My own source."""

    def documents(self) -> Iterator[tuple[str, str]]:
        for number in range(60):
            yield f"{number}", f"{number}: " + "Every rank maps it. " * (16 + number % 5)
'''
CONFIG = f"""\
run: {{name: mine, plotly: inline, report: false}}   # the page has everything
data: {{source: Repeated, tokenizer: Bytes, seq_len: 32}}
model: {{architecture: {SMALL_LLAMA}, sample_tokens: 4, optim: {{warmup: 0}}}}
trainer: {{accelerator: cpu, devices: 1, max_steps: 6, log_every_n_steps: 1, val_check_interval: 6}}
last_checkpoint: {{every_n_steps: 3, keep: 3}}
"""


def edit(path: Path, old: str, new: str) -> None:
    """Replaces a text that the file has."""
    assert old in path.read_text(), f"{path} has no {old!r}"
    path.write_text(path.read_text().replace(old, new))


def started(*command: str, cwd: Path, library: Path, fails: bool = False) -> str:
    """Runs a command with the library of a template's folder; returns what it printed."""
    env = {key: value for key, value in os.environ.items() if key not in OUTER}
    env |= {"PYTHONPATH": f"{library}/src", "OMP_NUM_THREADS": "1", "GIT_EDITOR": "true"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert bool(done.returncode) is fails, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def template(repository: Path, tmp_path: Path) -> Path:
    """A repository of its own of the present tree, released."""
    folder = Path(shutil.copytree(repository, tmp_path / "template"))
    git(folder, "tag", f"v{VERSION}")
    return folder


def release_next(template: Path) -> None:
    """Commits the next version: two conflicts with `edit_as_user`, new, removed, changed files."""
    project = template / "{{cookiecutter.project_slug}}"
    for name in ("cookiecutter.json", "pyproject.toml"):
        edit(template / name, f'"{VERSION}"', f'"{NEXT}"')
    edit(project / "Makefile", "STRATEGY ?= fsdp2", "STRATEGY ?= zero3")
    edit(project / "README.md", "You edit the model, the data", "You edit only the model, the data")
    edit(project / "configs" / "pretrain.yaml", "run:\n", "# News of the template.\nrun:\n")
    (project / "configs" / "news.yaml").write_text("trainer: {max_steps: 2}\n")
    (project / "configs" / "finetune.yaml").unlink()
    commit(template, f"Release {NEXT}")
    git(template, "tag", f"v{NEXT}")


def edit_as_user(project: Path) -> None:
    """Edits what a user owns, and commits the project only then."""
    edit(project / "Makefile", "STRATEGY ?= fsdp2", "STRATEGY ?= ddp")
    edit(project / "README.md", "You edit the model, the data and YAML.", "We edit the model.")
    edit(project / "configs" / "quickstart.yaml", "max_steps: 300", "max_steps: 299")
    (project / "configs" / "mine.yaml").write_text(CONFIG)
    for name in ("Makefile", "my_trainer/data.py"):
        with (project / name).open("a") as file:
            file.write(EDITS[name])
    method, mine = "    def configure_callbacks(", "    mine = 'an attribute of my own'"
    edit(project / "my_trainer" / "module.py", method, f"{mine}\n\n{method}")
    git(project, "init", "-q", "-b", "main")
    commit(project, "My project")


EDITS = {
    "Makefile": "\nmine:  ## my own command\n\t@echo mine\n",
    "README.md": "We edit the model.",
    "configs/quickstart.yaml": "max_steps: 299",
    "my_trainer/data.py": MINE,
    "my_trainer/module.py": "mine = 'an attribute of my own'",
}
FIT = [sys.executable, "-m", "my_trainer", "fit", "--config", "configs/mine.yaml"]
UPGRADE = ["make", "upgrade", f"RUN={sys.executable}", "TRUST=1"]


@pytest.mark.slow
def test_an_edited_project_is_upgraded_with_gits_conflicts(template: Path, tmp_path: Path) -> None:
    project = bake_from(f"git+file://localhost{template}", tmp_path, f"v{VERSION}").path
    edit_as_user(project)
    release_next(template)
    assert "error: upgraded from" in started(*UPGRADE, cwd=project, library=template, fails=True)
    conflicts = git(project, "diff", "--name-only", "--diff-filter=U").split()
    assert conflicts == ["Makefile", "README.md"]
    assert [(project / name).read_text().count("<<<<<<<") for name in conflicts] == [1, 1]
    assert [name for name in EDITS if EDITS[name] not in (project / name).read_text()] == []
    assert [(project / f"configs/{n}.yaml").exists() for n in ("news", "finetune")] == [True, False]
    assert "# News of the template." in (project / "configs/pretrain.yaml").read_text()
    assert f'template@v{NEXT}"' in (project / "pyproject.toml").read_text()

    git(project, "checkout", "--ours", "Makefile", "README.md")
    git(project, "add", "Makefile", "README.md")
    started("git", "cherry-pick", "--continue", cwd=project, library=template)
    assert not git(project, "status", "--porcelain")
    assert "nothing to upgrade" in started(*UPGRADE, cwd=project, library=template)


@pytest.mark.slow
def test_an_old_project_gets_the_new_shape_and_its_checkpoint_resumes_exactly(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subprocess.run(["git", "cat-file", "-e", OLD], cwd=ROOT, capture_output=True).returncode:
        pytest.skip(f"this checkout's history has no {OLD}")
    template = tmp_path / "template"
    git(ROOT, "clone", "-q", "--shared", "--no-checkout", ".", str(template))
    git(template, "checkout", "-q", OLD)
    git(template, "fetch", "-q", str(repository), "HEAD:refs/tags/new")
    project = bake_from(f"git+file://localhost{template}", tmp_path, OLD).path
    strategy = project / "configs" / "strategy" / "fsdp2.yaml"
    edit(strategy, "cpu_offload: false", "cpu_offload: true")
    edit(project / "constraints.txt", "zensical==", "my-own==1.0\nzensical==")
    edit(project / "Makefile", "\nsecrets:", "\nown:  ## amid theirs\n\t@echo own\n\nsecrets:")
    edit_as_user(project)
    started(*FIT, cwd=project, library=template)
    (whole,) = (project / "runs" / "mine").iterdir()

    printed = started(*UPGRADE, "TO=new", cwd=project, library=repository)
    assert "Makefile: your edits stay\nconfigs/strategy/fsdp2.yaml: your edits stay\n" in printed
    assert "constraints.txt: your edits stay, unread: move them to `pins` in pyproject" in printed
    assert not git(project, "status", "--porcelain")
    fresh = bake_into(tmp_path / "fresh", repository)
    kept = {"configs/mine.yaml", "configs/strategy/fsdp2.yaml", "constraints.txt"}
    assert {*git(project, "ls-files").splitlines()} == {*fresh.files} | kept
    was, now = fresh.digests, BakedProject(project, "my_trainer").digests
    assert {name for name in was if was[name] != now[name]} == {*EDITS}
    assert [name for name in EDITS if EDITS[name] not in (project / name).read_text()] == []
    assert "STRATEGY ?= ddp\n" in (project / "Makefile").read_text()
    listed = re.findall("  make ([a-z]+) ", started("make", cwd=project, library=repository))
    assert listed == "setup check test train rehearse upgrade lock clean own mine".split()
    monkeypatch.chdir(project)
    for name in ("configs/strategy/fsdp2.yaml", "strategy/fsdp2"):
        assert locate(name).resolve() == strategy

    tests = ["-m", "pytest", "-q", "tests/test_project.py", "-k", "configuration or next"]
    assert " passed" in started(sys.executable, *tests, cwd=project, library=repository)
    resumed = ["--run.name", "resumed", "--ckpt_path", f"{whole}/checkpoints/step00000003.ckpt"]
    started(*FIT, *resumed, cwd=project, library=repository)
    (again,) = (project / "runs" / "resumed").iterdir()
    for name in ("train/loss", "eval/loss"):
        series = [read_metrics(run)[name] for run in (whole, again)]
        before, after = (dict(zip(one.steps, one.values, strict=True)) for one in series)
        shared = [step for step in before if step > 3]
        assert shared and all(before[step] == after[step] for step in shared), name


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
    assert {*git(project, "ls-files").splitlines()} - {"mine.txt"} == {*fresh.files}
    assert (project / "README.md").read_text() == fresh.read("README.md")
    assert (outer / "mine.txt").exists() and not git(outer, "status", "--porcelain")
    assert len(git(outer, "log", "--oneline").splitlines()) == 2
    git(outer, "revert", "--no-edit", "HEAD")
    assert (project / "configs/finetune.yaml").exists()


def test_what_cannot_be_upgraded_is_refused_and_left_as_it_is(
    default: BakedProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
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
        record.write_text(re.sub('"template": "[^"]*"', change, text))
        commit(project, "another template")
        assert sentence in refusal()
    record.write_text(re.sub('"commit": [^,]*,', '"commit": "abc",', text))
    commit(project, "another commit")
    assert "has no abc: edit .cruft.json, or give another TO" in refusal()
    head = git(project, "rev-parse", "HEAD")
    monkeypatch.setitem(sys.modules, "cookiecutter", None)
    assert "cookiecutter: pip install 'dist-template[upgrade]'" in refusal()
    assert git(project, "rev-parse", "HEAD") == head and not git(project, "status", "--porcelain")


@pytest.mark.slow
def test_the_library_runs_the_project_of_the_newest_release(tmp_path: Path) -> None:
    listed = ["git", "tag", "--list", "v*.*.*", "--sort=-version:refname"]
    tags = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tags:
        pytest.skip("this checkout has no tag of a release")
    project = bake_from(f"git+file://localhost{ROOT}", tmp_path, tags[0]).path
    edit_as_user(project)
    started(*FIT, "--trainer.max_steps=2", cwd=project, library=ROOT)


@pytest.mark.slow
def test_hooks_of_an_address_run_only_where_somebody_trusts_it(
    default: BakedProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """An edited .cruft.json reaches everybody who pulls, and names a program to run."""
    project, evil = tmp_path / "project", tmp_path / "evil"
    shutil.copytree(default.path, project)
    for name, text in {
        "cookiecutter.json": '{"project_slug": "project"}',
        "hooks/pre_gen_project.py": f"open({str(tmp_path / 'ran')!r}, 'a').close()",
        "{{cookiecutter.project_slug}}/README.md": "news",
    }.items():
        (evil / name).parent.mkdir(parents=True, exist_ok=True)
        (evil / name).write_text(text)
    git(evil, "init", "-q")
    commit(evil, "A template")
    head, answers = git(evil, "rev-parse", "HEAD"), {"cookiecutter": {"a": "b"}}
    record = {"template": str(evil), "commit": head, "context": answers}
    (project / ".cruft.json").write_text(json.dumps(record))
    git(project, "init", "-q")
    commit(project, "My project")
    (evil / "{{cookiecutter.project_slug}}" / "NEWS.md").write_text("more")
    commit(evil, "More")
    monkeypatch.setattr(Project, "folder", project / "my_trainer")
    assert main(["upgrade"]) == 2
    shown = capsys.readouterr()
    assert shown.out == f"the template is {evil}\n"
    assert f"error: upgrade runs the hooks of {evil}, which .cruft.json names: give" in shown.err
    assert not (tmp_path / "ran").exists()
    main(["upgrade", "--trust"])
    assert (tmp_path / "ran").exists()
    git(project, "reset", "-q", "--hard")
    record["template"] = "--upload-pack=touch${IFS}ran"
    (project / ".cruft.json").write_text(json.dumps(record))
    commit(project, "Another address")
    capsys.readouterr()
    assert main(["upgrade", "--trust"]) == 2 and "fails: fatal" in capsys.readouterr().err
