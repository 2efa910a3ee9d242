"""A release: one version, refusals in one sentence, equal bytes; workflows call what exists;
supported versions."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from .conftest import OUTER, ROOT, SOURCE, run

LIBRARY = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
VERSION = LIBRARY["version"]
PARTS = ["What you have to do", "Deprecated", "Added", "Changed", "Removed", "Fixed"]
WORKFLOWS = sorted([*ROOT.glob(".github/workflows/*.yml"), *SOURCE.glob(".github/workflows/*.yml")])
WHO = {
    f"GIT_{role}_{what}": "ada@example.org"
    for role in ("AUTHOR", "COMMITTER")
    for what in ("NAME", "EMAIL")
}


def test_tag_library_template_and_changelog_have_one_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    sections = re.findall(r"^## (.*?) \((.*)\)$", changelog, flags=re.MULTILINE)
    assert (
        sections[0][0]
        == VERSION
        == json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))["_version"]
    )
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in sections[1:])
    for section in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        parts = re.findall(r"^### (.*)$", section, flags=re.MULTILINE)
        assert parts[0] == PARTS[0] and parts == [part for part in PARTS if part in parts]
    tags = run("git", "tag", "--points-at", "HEAD", "--list", "v*.*.*", cwd=ROOT).stdout.split()
    assert tags in ([], [f"v{VERSION}"])


# ---- make release --------------------------------------------------------------------------------


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    """A clone of the repository whose newest tag is v0.0.9."""
    run("git", "clone", "-q", "--no-tags", str(repository), "checkout", cwd=tmp_path)
    run("git", "tag", "v0.0.9", cwd=tmp_path / "checkout")
    (tmp_path / "checkout" / "docs" / "reference.md").write_text(
        "# Configuration reference\n"
    )  # by `make docs`
    return tmp_path / "checkout"


def release(
    checkout: Path, *arguments: str, umask: int = 0o022, **settings: str
) -> subprocess.CompletedProcess[str]:
    command, settings = [sys.executable, ".ci/release.py", *arguments], os.environ | WHO | settings
    return subprocess.run(
        command, cwd=checkout, env=settings, umask=umask, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("version", "spoil", "sentence"),
    [
        ("", "", "VERSION is ''; three numbers are allowed"),
        ("1.2", "", "VERSION is '1.2'; three numbers are allowed"),
        (VERSION, "echo >> README.md", "the working tree has changes"),
        ("0.0.9", "", f"VERSION 0.0.9 is not newer than {VERSION}"),
        ("0.0.10", "", f"VERSION 0.0.10 is not newer than {VERSION}"),
        (VERSION, f"git tag v{VERSION}", f"VERSION {VERSION} is not newer than {VERSION}"),
        (
            "7.0.0",
            "",
            f"CHANGELOG.md's newest section is {VERSION}: write '## 7.0.0 (not released)'",
        ),
        (
            VERSION,
            "sed -i s/What/It/ CHANGELOG.md; git commit -qam x",
            "lacks '### What you have to do'",
        ),
        (
            VERSION,
            "sed -i 's/^torch==.*/torch==9 /' */lock-cuda.txt; git commit -qam x",
            "the table of models is of",
        ),
    ],
)
def test_what_cannot_be_released_is_refused_in_one_sentence(
    checkout: Path, version: str, spoil: str, sentence: str
) -> None:
    run("bash", "-c", spoil, cwd=checkout, **WHO)
    before = run("git", "status", "--porcelain", cwd=checkout).stdout
    done = release(checkout, "commit", version)
    assert (
        done.returncode == 1
        and sentence in done.stderr
        and len(done.stderr.strip().splitlines()) == 1
    )
    assert run("git", "status", "--porcelain", cwd=checkout).stdout == before


def test_a_release_sets_the_version_in_every_place_and_commits(checkout: Path) -> None:
    changelog = checkout / "CHANGELOG.md"
    section = "## 7.0.0 (not released)\n\n### What you have to do\n\nNothing.\n\n"
    changelog.write_text(changelog.read_text("utf-8").replace("## ", f"{section}## ", 1), "utf-8")
    run("git", "commit", "-qam", "news", cwd=checkout, **WHO)
    assert release(checkout, "commit", "7.0.0").returncode == 0
    changed = run("git", "show", "--format=%s", "--name-only", cwd=checkout).stdout.split("\n")
    assert changed[0] == "Release 7.0.0"
    assert set(changed[2:]) - {""} == {"CHANGELOG.md", "cookiecutter.json", "pyproject.toml"}
    assert (
        tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))["project"]["version"]
        == "7.0.0"
    )
    assert json.loads((checkout / "cookiecutter.json").read_text("utf-8"))["_version"] == "7.0.0"
    assert re.search(
        r"^## 7\.0\.0 \(\d{4}-\d\d-\d\d\)$", changelog.read_text("utf-8"), flags=re.MULTILINE
    )
    assert "the tag is v1.0.0, the version 7.0.0" in release(checkout, "build", "v1.0.0").stderr


@pytest.mark.slow
def test_two_builds_of_a_commit_have_the_same_bytes(checkout: Path, tmp_path: Path) -> None:
    first = release(checkout, "build", f"v{VERSION}")
    assert first.returncode == 0 and f"git tag -a v{VERSION}" in first.stdout, first.stderr
    shutil.move(checkout / "build" / "release", tmp_path / "first")
    for path in (checkout / "src").rglob("*.py"):
        os.utime(path, (1, 1))
    assert release(checkout, "build", umask=0o077, TZ="Asia/Tokyo").returncode == 0
    one, two = ({str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
                for out in (tmp_path / "first", checkout / "build" / "release"))  # fmt: skip
    assert len(one) == 5 and one == two
    wheel = zipfile.ZipFile(next((tmp_path / "first").rglob("*.whl")))
    assert any(name.endswith("/share/doc/dist-template/reference.md") for name in wheel.namelist())
    assert one["NOTES.md"].startswith(b"Nothing was") or one["NOTES.md"].startswith(
        b"### What you have to do"
    )


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_machine_without_a_checkout_installs_generates_and_trains(
    checkout: Path, tmp_path: Path
) -> None:
    assert release(checkout, "build").returncode == 0
    wheel, archive = (
        next((checkout / "build" / "release").rglob(name)) for name in ("*.whl", "*.zip")
    )
    fresh, settings = (
        tmp_path / "fresh",
        {key: value for key, value in os.environ.items() if key not in OUTER},
    )
    fresh.mkdir()
    for command in (
        [sys.executable, "-m", "venv", "env"],
        ["env/bin/python", "-m", "pip", "install", "--quiet", "cookiecutter"],
        ["env/bin/python", "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)],
        ["env/bin/cookiecutter", str(archive), "--no-input", "--default-config"],
        ["make", "-C", "my-trainer", "setup", "train", "test"],
    ):
        done = subprocess.run(
            command, cwd=fresh, env=settings | {"PWD": str(fresh)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert f'dist-template @ {archive.as_uri()}"' in (
        fresh / "my-trainer" / "pyproject.toml"
    ).read_text("utf-8")
    where = "import dist_template, importlib.metadata as m; print(dist_template.__file__, m.version('dist-template'))"
    found = run("my-trainer/.venv/bin/python", "-c", where, cwd=fresh, PYTHONPATH="").stdout.split()
    assert Path(found[0]).is_relative_to(fresh / "my-trainer" / ".venv") and found[1] == VERSION


# ---- workflows and supported versions ------------------------------------------------------------


@pytest.mark.parametrize(
    "path", WORKFLOWS, ids=lambda path: "-".join(path.relative_to(ROOT).parts[-3:])
)
def test_a_workflow_calls_what_exists_and_pins_its_actions(path: Path) -> None:
    workflow, root = (
        yaml.safe_load(path.read_text("utf-8")),
        ROOT if path.is_relative_to(ROOT / ".github") else SOURCE,
    )
    assert workflow["permissions"] == {
        "contents": "read"
    }  # what a job needs beyond that, the job says
    targets = set(
        re.findall(r"^([a-z-]+):", (root / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
    )
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    for step in steps:
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), (
                f"{step['uses']} is not pinned by digest"
            )
        for line in step.get("run", "").splitlines():
            tool, *words = line.split()
            known = {
                "make": words[0] in targets if words else False,
                "gh": words[:2] == ["release", "create"],
            }
            known[".venv/bin/python"] = words[:3] == ["-m", "pip", "install"]
            assert known.get(tool, (root / tool).is_file()), f"{path}: {line}"
    assert steps and all(
        job["timeout-minutes"] for job in workflow["jobs"].values() if "strategy" in job
    )


def test_the_table_of_supported_versions_is_that_of_pyproject() -> None:
    page = (ROOT / "docs" / "upgrade.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` \| `([^`]+)` \|", page, flags=re.MULTILINE))
    extras = LIBRARY["optional-dependencies"]
    asked = [*LIBRARY["dependencies"], *(each for extra in extras for each in extras[extra])]
    found = {
        match[1]: match[2]
        for each in asked
        if (match := re.fullmatch(r"([\w-]+)(?:\[\w+\])?([<>=!].*)", each))
    }
    found["python"] = LIBRARY["requires-python"]
    assert {"python", "torch", "lightning", "transformers", "deepspeed"} <= rows.keys()
    assert rows == {name: found[name] for name in rows}
    text = (SOURCE / "lock-cuda.txt").read_text("utf-8")
    lock = dict(re.findall(r"^([\w-]+)==([\w.]+)", text, flags=re.MULTILINE))
    pinned = dict(
        re.findall(r"^\| `([\w-]+)` \| `[^`]+` \| [^|]+ \| ([^|]+) \|", page, flags=re.MULTILINE)
    )
    assert pinned == {name: lock.get(name, "3.11") for name in rows}


def test_a_tag_with_commands_in_its_name_is_an_argument(tmp_path: Path) -> None:
    """git allows `;`, `$(` and quotes in the name of a tag, and whoever may push one starts
    release.yml."""
    tag = "v1.2.3;touch${IFS}ran;'`touch${IFS}ran`"
    text = (ROOT / "Makefile").read_text("utf-8")
    recipes = [line for line in text.splitlines() if line.startswith("\t") and "TAG" in line]
    assert len(recipes) == 2 and not any("$(TAG)" in line for line in recipes)
    build = next(line for line in recipes if "release.py build" in line).replace(
        ".venv/bin/python .ci/release.py", "@echo"
    )
    (tmp_path / "Makefile").write_text(text[: text.index("\nPYTHON")] + f"\ndist:\n{build}\n")
    for command in (["make", "dist"], ["make", "dist", f"TAG={tag.replace('$', '$$')}"]):
        env = {
            k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")
        }  # `make test` sets both
        env |= {"TAG": tag} if len(command) == 2 else {}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.stdout == f"build {tag}\n", done.stdout + done.stderr
    assert not (tmp_path / "ran").exists()
    lines = [line.strip() for path in WORKFLOWS for line in path.read_text("utf-8").splitlines()]
    uses = [
        line.partition("  #")[0] for line in lines if re.search(r"(?i)ref_name|github\.ref\b", line)
    ]
    assert uses[0] == "TAG: ${{ github.ref_name }}" and all(
        'create "$GITHUB_REF_NAME" --' in line for line in uses[1:]
    )
