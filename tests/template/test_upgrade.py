"""`make upgrade` of a project that its user has edited: no edit is lost, conflicts are git's."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from dist_template import Project
from dist_template.cli.config_file import locate
from tests import ROOT
from tests.support.line import main
from tests.support.runs import SMALL_LLAMA, logged

from .conftest import VERSION, BakedProject, bake_from, bake_into, commit, edit, git, output, run

Captured = pytest.CaptureFixture[str]
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


METHOD, MINE_TOO = "    def configure_callbacks(", "    mine = 'an attribute of my own'\n\n"
EDITS = {  # file: text there, or "" for its end; a user's own text
    "Makefile": ("", "\nmine:  ## my own command\n\t@echo mine\n"),
    "README.md": ("You edit the model, the data and YAML.", "We edit the model."),
    "configs/quickstart.yaml": ("max_steps: 300", "max_steps: 299"),
    "my_trainer/data.py": ("", MINE),
    "my_trainer/module.py": (METHOD, MINE_TOO + METHOD),
}


def edit_as_user(project: Path) -> None:
    """Edits what a user owns, and commits the project only then."""
    edit(project / "Makefile", "STRATEGY ?= fsdp2", "STRATEGY ?= ddp")
    (project / "configs" / "mine.yaml").write_text(CONFIG)
    for name, (old, new) in EDITS.items():
        edit(project / name, old, new)
    commit(project, "My project")


FIT = [sys.executable, "-m", "my_trainer", "fit", "--config", "configs/mine.yaml"]
UPGRADE = ["make", "upgrade", f"RUN={sys.executable}", "TRUST=1"]


def lost_edits(project: Path) -> list[str]:
    return [name for name, (_, new) in EDITS.items() if new not in (project / name).read_text()]


@pytest.mark.slow
def test_an_edited_project_is_upgraded_with_gits_conflicts(template: Path, tmp_path: Path) -> None:
    project = bake_from(f"git+file://localhost{template}", tmp_path, f"v{VERSION}")
    edit_as_user(project)
    release_next(template)
    done = run(*UPGRADE, cwd=project)
    assert done.returncode and "error: upgraded from" in done.stderr, done.stdout + done.stderr
    conflicts = git(project, "diff", "--name-only", "--diff-filter=U").split()
    assert conflicts == ["Makefile", "README.md"]
    assert [(project / name).read_text().count("<<<<<<<") for name in conflicts] == [1, 1]
    assert lost_edits(project) == []
    assert [(project / f"configs/{n}.yaml").exists() for n in ("news", "finetune")] == [True, False]
    assert "# News of the template." in (project / "configs/pretrain.yaml").read_text()
    assert f'template@v{NEXT}"' in (project / "pyproject.toml").read_text()

    git(project, "checkout", "--ours", *conflicts)
    git(project, "add", *conflicts)
    git(project, "-c", "core.editor=true", "cherry-pick", "--continue")
    assert not git(project, "status", "--porcelain")
    assert "nothing to upgrade" in output(*UPGRADE, cwd=project)


@pytest.mark.slow
def test_an_old_project_gets_the_new_shape_and_its_checkpoint_resumes_exactly(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if run("git", "cat-file", "-e", OLD, cwd=ROOT).returncode:
        pytest.skip(f"this checkout's history has no {OLD}")
    template = tmp_path / "template"
    git(ROOT, "clone", "-q", "--shared", "--no-checkout", ".", str(template))
    git(template, "checkout", "-q", OLD)
    git(template, "fetch", "-q", str(repository), "HEAD:refs/tags/new")
    project = bake_from(f"git+file://localhost{template}", tmp_path, OLD)
    strategy = project / "configs" / "strategy" / "fsdp2.yaml"
    edit(strategy, "cpu_offload: false", "cpu_offload: true")
    edit(project / "constraints.txt", "zensical==", "my-own==1.0\nzensical==")
    edit_as_user(project)
    output(*FIT, cwd=project, PYTHONPATH=f"{template}/src")
    (whole,) = (project / "runs" / "mine").iterdir()

    done = run(*UPGRADE, "TO=new", cwd=project)
    stay = "configs/strategy/fsdp2.yaml: your edits stay\nconstraints.txt: your edits stay\n"
    assert stay in done.stdout and "with conflicts in Makefile: edit" in done.stderr
    git(project, "checkout", "--theirs", "Makefile")
    commit(project, "Upgraded")
    fresh = bake_into(tmp_path / "fresh", repository)
    kept = {"configs/mine.yaml", "configs/strategy/fsdp2.yaml", "constraints.txt"}
    assert {*git(project, "ls-files").splitlines()} == {*fresh.files} | kept
    was, now = fresh.contents, BakedProject(project).contents
    assert {name for name in was if was[name] != now[name]} == {*EDITS} - {"Makefile"}
    assert lost_edits(project) == ["Makefile"]
    monkeypatch.chdir(project)
    for name in ("configs/strategy/fsdp2.yaml", "strategy/fsdp2"):
        assert locate(name).resolve() == strategy

    resumed = ["--run.name", "resumed", "--ckpt_path", f"{whole}/checkpoints/step00000003.ckpt"]
    output(*FIT, *resumed, cwd=project)
    (again,) = (project / "runs" / "resumed").iterdir()
    for name in ("train/loss", "eval/loss"):
        before, after = logged(whole, name), logged(again, name)
        shared = [step for step in before if step > 3]
        assert shared and all(before[step] == after[step] for step in shared), name


def upgraded(project: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    """`python -m <package> upgrade` in this process."""
    monkeypatch.setattr(Project, "folder", project / "my_trainer")
    return main(["upgrade", "--trust", *flags])


@pytest.mark.slow
def test_inside_a_repository_and_without_conflicts_there_is_one_commit(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = tmp_path / "out"
    project = bake_into(outer, template).path
    (outer / "mine.txt").write_text("mine\n")
    commit(outer, "My project")
    release_next(template)
    assert upgraded(project, monkeypatch) == 0
    fresh = bake_into(tmp_path / "fresh", template)
    assert {*git(project, "ls-files").splitlines()} == {*fresh.files}
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

    def refusal() -> str:
        assert upgraded(project, monkeypatch) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1, error
        return error

    assert "`git cat-file -e` fails: fatal: not a git repository" in refusal()
    commit(project, "My project")
    (project / "README.md").write_text("edited")
    assert "README.md has uncommitted changes: commit or stash them" in refusal()
    git(project, "checkout", "README.md")
    text = record.read_text()
    for pattern, change, sentence in (
        ("template", '""', "cannot be read: it has no template, commit or answers"),
        ("template", '"/nowhere"', "`git clone --quiet -- /nowhere` fails: fatal: repository"),
        ("template", '"http://127.0.0.1:9/a.git"', "a.git` fails: fatal: unable to access"),
        ("template", '"--upload-pack=touch"', "-- --upload-pack=touch` fails: fatal: repository"),
        ("commit", '"abc"', "has no abc: edit .cruft.json, or give another TO"),
    ):
        record.write_text(re.sub(f'"{pattern}": [^,]*', f'"{pattern}": {change}', text))
        commit(project, "another record")
        assert sentence in refusal()
    head = git(project, "rev-parse", "HEAD")
    monkeypatch.setitem(sys.modules, "cookiecutter", None)
    assert "cookiecutter: pip install 'cookiecutter" in refusal()
    assert git(project, "rev-parse", "HEAD") == head and not git(project, "status", "--porcelain")


@pytest.mark.slow
def test_the_library_runs_the_project_of_the_newest_release(tmp_path: Path) -> None:
    listed = ["git", "tag", "--list", "v*.*.*", "--sort=-version:refname"]
    tags = run(*listed, cwd=ROOT).stdout.split()
    if not tags:
        pytest.skip("this checkout has no tag of a release")
    project = bake_from(f"git+file://localhost{ROOT}", tmp_path, tags[0])
    edit_as_user(project)
    output(*FIT, "--trainer.max_steps=2", cwd=project)


@pytest.mark.slow
def test_hooks_of_an_address_run_only_where_somebody_trusts_it(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """An edited .cruft.json reaches everybody who pulls, and names a program to run."""
    project, ran = bake_into(tmp_path / "out", template).path, tmp_path / "ran"
    commit(project, "My project")
    with (template / "hooks" / "pre_gen_project.py").open("a") as file:
        file.write(f"open({str(ran)!r}, 'a').close()\n")
    commit(template, "Another hook")
    monkeypatch.setattr(Project, "folder", project / "my_trainer")
    assert main(["upgrade", "--to=HEAD"]) == 2
    shown = capsys.readouterr()
    assert shown.out.endswith(f"the template is {template}\n")
    sentence = f"error: upgrade runs the hooks of {template}, which .cruft.json names: give"
    assert sentence in shown.err and not ran.exists()
    main(["upgrade", "--to=HEAD", "--trust"])
    assert ran.exists()
