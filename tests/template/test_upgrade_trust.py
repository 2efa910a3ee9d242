"""`upgrade` runs no hook of an address that nobody has trusted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dist_template import Project
from tests.support.commits import commit, git, somebody  # noqa: F401  (a fixture)
from tests.support.line import main

from .conftest import BakedProject


@pytest.mark.slow
def test_hooks_of_an_address_run_only_where_somebody_trusts_it(
    default: BakedProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A commit that edits .cruft.json reaches everybody who pulls; its address is a program on their machines."""
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
    record = {"template": str(evil), "commit": git(evil, "rev-parse", "HEAD"), "context": {"cookiecutter": {"a": "b"}}}
    (project / ".cruft.json").write_text(json.dumps(record))
    git(project, "init", "-q")
    commit(project, "My project")
    (evil / "{{cookiecutter.project_slug}}" / "NEWS.md").write_text("more")
    commit(evil, "More")
    monkeypatch.setattr(Project, "folder", project / "my_trainer")
    assert main(["upgrade"]) == 2
    shown = capsys.readouterr()
    assert shown.out == f"the template is {evil}\n"
    assert f"error: upgrade runs the hooks of {evil}, which .cruft.json names: give --trust" in shown.err
    assert not (tmp_path / "ran").exists()
    main(["upgrade", "--trust"])
    assert (tmp_path / "ran").exists()
    git(project, "reset", "-q", "--hard")
    record["template"] = "--upload-pack=touch${IFS}ran"
    (project / ".cruft.json").write_text(json.dumps(record))
    commit(project, "Another address")
    capsys.readouterr()
    assert main(["upgrade", "--trust"]) == 2 and "fails: fatal" in capsys.readouterr().err
