"""A release: one version, refusals, equal bytes; what is in packages; workflows; versions."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from .conftest import LIBRARY, ROOT, SOURCE, VERSION, BakedProject, bake_from, git, output, run

PARTS = ["What you have to do", "Deprecated", "Added", "Changed", "Removed", "Fixed"]
WORKFLOWS = sorted([*ROOT.glob(".github/workflows/*.yml"), *SOURCE.glob(".github/workflows/*.yml")])


def test_tag_library_template_and_changelog_have_one_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    sections = re.findall(r"^## (.*?) \((.*)\)$", changelog, flags=re.MULTILINE)
    template = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))
    assert sections[0][0] == VERSION == template["_version"]
    device = tomllib.loads((ROOT / "fake-cuda" / "pyproject.toml").read_text("utf-8"))
    assert device["project"]["version"] == VERSION
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in sections[1:])
    for section in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        parts = re.findall(r"^### (.*)$", section, flags=re.MULTILINE)
        assert parts[0] == PARTS[0] and parts == [part for part in PARTS if part in parts]
    tags = run("git", "tag", "--points-at", "HEAD", "--list", "v*.*.*", cwd=ROOT).stdout.strip()
    assert tags in ("", f"v{VERSION}")


# ---- make release --------------------------------------------------------------------------------


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    """A clone whose newest tag is v0.0.9, with the page that `make docs` writes."""
    git(tmp_path, "clone", "-q", "--no-tags", str(repository), "checkout")
    git(tmp_path / "checkout", "tag", "v0.0.9")
    (tmp_path / "checkout" / "docs" / "reference.md").write_text("# Configuration reference\n")
    return tmp_path / "checkout"


def release(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, ".ci/release.py", *arguments, cwd=checkout)


REFUSED = [  # version, a command before, the sentence
    ("1.2", "", "VERSION is '1.2'; three numbers are allowed"),
    (VERSION, "echo >> README.md", "the working tree has changes"),
    ("0.0.10", "", f"VERSION 0.0.10 is not newer than {VERSION}"),
    (VERSION, f"git tag v{VERSION}", f"VERSION {VERSION} is not newer than {VERSION}"),
    ("7.0.0", "", f"CHANGELOG.md's newest section is {VERSION}: write '## 7.0.0 (not released)'"),
    (VERSION, "sed -i s/What/It/ CHANGELOG.md; git commit -qam x", "lacks '### What you have"),
    (
        VERSION,
        "sed -i 's/^torch==.*/torch==9 /' */lock-cuda.txt; git commit -qam x",
        "the table of models is of",
    ),
]


@pytest.mark.parametrize(("version", "spoil", "sentence"), REFUSED)
def test_a_bad_release_is_refused(checkout: Path, version: str, spoil: str, sentence: str) -> None:
    output("bash", "-c", spoil, cwd=checkout)
    before = git(checkout, "status", "--porcelain")
    done = release(checkout, "commit", version)
    assert done.returncode == 1 and sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert git(checkout, "status", "--porcelain") == before


def test_a_release_sets_the_version_in_every_place_and_commits(checkout: Path) -> None:
    changelog = checkout / "CHANGELOG.md"
    section = "## 7.0.0 (not released)\n\n### What you have to do\n\nNothing.\n\n"
    changelog.write_text(changelog.read_text("utf-8").replace("## ", f"{section}## ", 1), "utf-8")
    git(checkout, "commit", "-qam", "news")
    assert release(checkout, "commit", "7.0.0").returncode == 0
    subject, *changed = git(checkout, "show", "--format=%s", "--name-only").split("\n")
    assert subject == "Release 7.0.0"
    versions = {"cookiecutter.json", "pyproject.toml", "fake-cuda/pyproject.toml"}
    assert {*changed} - {""} == {"CHANGELOG.md", *versions}
    assert '\nversion = "7.0.0"' in (checkout / "pyproject.toml").read_text("utf-8")
    assert '"_version": "7.0.0"' in (checkout / "cookiecutter.json").read_text("utf-8")
    assert re.search(r"(?m)^## 7\.0\.0 \(\d{4}-\d\d-\d\d\)$", changelog.read_text("utf-8"))
    assert "the tag is v1.0.0, the version 7.0.0" in release(checkout, "build", "v1.0.0").stderr


@pytest.mark.slow
def test_builds_are_equal_and_a_wheel_has_library_and_pages(checkout: Path, tmp_path: Path) -> None:
    first = release(checkout, "build", f"v{VERSION}")
    assert first.returncode == 0 and f"git tag -a v{VERSION}" in first.stdout, first.stderr
    shutil.move(checkout / "build" / "release", tmp_path / "first")
    for path in (checkout / "src").rglob("*.py"):
        os.utime(path, (1, 1))
    second = f"umask 077; '{sys.executable}' .ci/release.py build"
    output("bash", "-c", second, cwd=checkout, TZ="Asia/Tokyo")
    one, two = map(contents, (tmp_path / "first", checkout / "build" / "release"))
    assert len(one) == 5 and one == two
    assert one["NOTES.md"].startswith((b"Nothing was", b"### What you have to do"))

    names = zipfile.ZipFile(next((tmp_path / "first").rglob("*.whl"))).namelist()
    library = set(contents(checkout / "src"))
    assert {each for each in names if not re.match(r"[^/]*\.(dist-info|data)/", each)} == library
    assert {"dist_template/py.typed", "dist_template/configs/strategy/fsdp2.yaml"} <= library
    suffixes = set(".py .typed .cpp .hpp .css .html .json .template .yaml".split())
    assert {Path(name).suffix for name in library} == suffixes
    pages = {name for name in contents(checkout / "docs") if name.endswith(".md")}
    shared = [each.partition("/share/doc/dist-template/")[2] for each in names if ".data/" in each]
    assert set(shared) == pages


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_machine_without_a_checkout_generates_and_trains(checkout: Path, tmp_path: Path) -> None:
    assert release(checkout, "build").returncode == 0
    built, fresh = checkout / "build" / "release", tmp_path / "fresh"
    wheel, archive = (next(built.rglob(name)) for name in ("*.whl", "*.zip"))
    fresh.mkdir()
    for command in (
        f"{sys.executable} -m venv env",
        "env/bin/python -m pip install --quiet cookiecutter",
        f"env/bin/python -m pip install --quiet --no-deps {wheel}",
        f"env/bin/cookiecutter {archive} --no-input --default-config",
        "make -C my-trainer setup train test",
    ):
        output(*command.split(), cwd=fresh, PYTHONPATH="")
    pinned = (fresh / "my-trainer" / "pyproject.toml").read_text("utf-8")
    assert f'dist-template @ {archive.as_uri()}"' in pinned
    where = "import dist_template as d, importlib.metadata as m;"
    where += "print(d.__file__, m.version('dist-template'))"
    found = output("my-trainer/.venv/bin/python", "-c", where, cwd=fresh, PYTHONPATH="").split()
    assert Path(found[0]).is_relative_to(fresh / "my-trainer" / ".venv") and found[1] == VERSION


# ---- workflows and supported versions ------------------------------------------------------------


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: "-".join(path.parts[-4:]))
def test_a_workflow_calls_what_exists_and_pins_its_actions(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text("utf-8"))
    root = ROOT if path.is_relative_to(ROOT / ".github") else SOURCE
    assert workflow["permissions"] == {"contents": "read"}  # a job says what else it needs
    targets = set(re.findall(r"(?m)^([a-z-]+):", (root / "Makefile").read_text("utf-8")))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    for step in steps:
        pinned = re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step.get("uses", f"a/b@{'0' * 40}"))
        assert pinned, f"{step['uses']} is not pinned by digest"
        for line in step.get("run", "").splitlines():
            tool, *words = line.split()
            known = {"make": {*words[:1]} & targets, "gh": words[:2] == ["release", "create"]}
            installs = words[:3] == ["-m", "pip", "install"]
            known[".venv/bin/python"] = installs or "evaluate" in words  # test_ci.py runs that
            assert known.get(tool, (root / tool).is_file()), f"{path}: {line}"
    matrices = [job for job in workflow["jobs"].values() if "strategy" in job]
    assert steps and all(job["timeout-minutes"] for job in matrices)


def test_the_table_of_supported_versions_is_that_of_pyproject() -> None:
    page = (ROOT / "docs" / "upgrade.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` \| `([^`]+)` \|", page, flags=re.MULTILINE))
    extras = LIBRARY["optional-dependencies"]
    asked = [*LIBRARY["dependencies"], *(each for extra in extras for each in extras[extra])]
    parts = [re.fullmatch(r"([\w-]+)(?:\[\w+\])?([<>=!].*)", each) for each in asked]
    found = {match[1]: match[2] for match in parts if match}
    found["python"] = LIBRARY["requires-python"]
    assert {"python", "torch", "lightning", "transformers", "deepspeed"} <= rows.keys()
    assert rows == {name: found[name] for name in rows}
    text = (SOURCE / "lock-cuda.txt").read_text("utf-8")
    lock = dict(re.findall(r"^([\w-]+)==([\w.]+)", text, flags=re.MULTILINE))
    pinned = dict(re.findall(r"(?m)^\| `([\w-]+)` \| `[^`]+` \| [^|]+ \| ([^|]+) \|", page))
    assert pinned == {name: lock.get(name, "3.11") for name in rows}


def pin_of(project: Path) -> str:
    chosen = tomllib.loads((project / "pyproject.toml").read_text())
    assert chosen["project"]["dependencies"] == ["dist-template[all]"]
    return chosen["tool"]["environment"]["library"]


# Packages of extras, and the only places that import them at the top of a module.
OF_EXTRAS = {
    "jsonargparse": ("/cli/", "/wings/"),
    "transformers": ("/text/", "/wings/", "/compat/parallel_styles", "/compat/transformers_"),
    "tokenizers": ("/text/", "/wings/"),
    "safetensors": ("/text/", "/wings/"),
    "h11": ("/wings/", "/compat/uvicorn"),
    "jinja2": ("/wings/",),
    "optuna": ("/wings/",),
    "starlette": ("/wings/", "/compat/transformers_serving"),
    "uvicorn": ("/wings/", "/compat/uvicorn", "/compat/transformers_serving"),
}


def test_what_is_imported_with_the_library_is_required_by_it() -> None:
    """Imports at the top of a module; what extras bring is imported late, or in its own rooms."""
    required = {re.split(r"[^\w.-]", each)[0].lower() for each in LIBRARY["dependencies"]}
    owners = importlib.metadata.packages_distributions()
    known = {name for name in owners if required & {owner.lower() for owner in owners[name]}}
    own = {path.name for path in (ROOT / "src").iterdir()}
    allowed = sys.stdlib_module_names | known | own
    imported = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                package = name.partition(".")[0]
                imported.add(package)
                rooms = OF_EXTRAS.get(package, ())
                assert package in allowed or any(room in str(path) for room in rooms), (name, path)
    assert {"torch", "jsonargparse"} <= imported


def test_a_project_from_a_folder_uses_its_library(default: BakedProject, tmp_path: Path) -> None:
    assert pin_of(default.path) == f"dist-template @ {ROOT.as_uri()}/"
    command = ["cookiecutter", ".", "--no-input", "--default-config", "-o", str(tmp_path)]
    output(sys.executable, "-m", *command, cwd=ROOT)
    assert pin_of(tmp_path / "my-trainer") == pin_of(default.path)


@pytest.mark.slow
def test_a_project_from_git_pins_the_commit_for_pip(repository: Path, tmp_path: Path) -> None:
    project = bake_from(f"git+file://{repository}", tmp_path)
    head = git(repository, "rev-parse", "HEAD")
    assert pin_of(project) == f"dist-template @ git+file://localhost{repository}@{head}"
    dry = "install --dry-run --no-deps --no-build-isolation --ignore-installed"
    printed = output(sys.executable, "-m", "pip", *dry.split(), pin_of(project), cwd=tmp_path)
    assert f"Would install dist-template-{VERSION}" in printed
    page = (project / "README.md").read_text()
    assert "localhost" in page and f"/blob/{head}/docs/index.md)" in page


REPOSITORY = "example.org/my/repo"
ADDRESSES = [  # what was asked for, what is pinned
    (f"https://me:secret@{REPOSITORY}.git", f"https://{REPOSITORY}.git"),
    ("git@example.org:my/repo.git", f"ssh://git@{REPOSITORY}.git"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "pinned"), ADDRESSES)
def test_an_address_becomes_one_that_pip_reads_and_holds_no_password(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, pinned: str
) -> None:
    # git goes to the local repository, and believes in the address
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://localhost{repository}.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", asked)
    project = bake_from(asked, tmp_path, "v1")
    assert pin_of(project) == f"dist-template @ git+{pinned}@v1"
    page = (project / "README.md").read_text()
    assert f"[Documentation](https://{REPOSITORY}/blob/v1/docs/index.md)" in page
    assert json.loads((project / ".cruft.json").read_text())["template"] == pinned


@pytest.mark.slow
def test_a_published_version_is_pinned_by_its_number(repository: Path, tmp_path: Path) -> None:
    released = Path(shutil.copytree(repository, tmp_path / "released"))
    git(released, "tag", f"v{VERSION}")
    project = bake_from(f"git+file://{released}", tmp_path, f"v{VERSION}", _published=True)
    assert pin_of(project) == f"dist-template=={VERSION}"


@pytest.mark.slow
def test_the_archive_of_a_release_pins_its_tag(repository: Path, tmp_path: Path) -> None:
    address, archive = f"git+file://localhost{repository}", tmp_path / "my-trainer.tar.gz"
    for source in (str(repository), address):
        command = ["make", "starter", "READY=", f"OUT={tmp_path}", f"FROM={source}", "TAG=v1"]
        done = run(*command, cwd=ROOT, HOME=str(tmp_path))
        is_made = source == address
        assert (done.returncode == 0) == archive.exists() == is_made, done.stdout + done.stderr
        assert ("is a folder, which other machines do not have" in done.stdout) != is_made
    assert {"my-trainer/Makefile", "my-trainer/lock-cpu.txt"} <= {*tarfile.open(archive).getnames()}
    assert pin_of(tmp_path / "starter" / "my-trainer") == f"dist-template @ {address}@v1"
