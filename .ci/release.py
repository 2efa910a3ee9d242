"""Checks a release (check 1.2.3), sets its version and commits (commit 1.2.3), builds HEAD into
build/release (build).

Two builds of one commit have the same bytes: their times are the commit's. Nothing is tagged or
pushed.
"""

import datetime
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

from packaging.version import Version

OUT = Path("build/release").absolute()
PLACES = {
    "pyproject.toml": r'^(version = ")[^"]*',
    "fake-cuda/pyproject.toml": r'^(version = ")[^"]*',
    "cookiecutter.json": r'^(  "_version": ")[^"]*',
}
PROOF, PINS = (
    Path("src/dist_template/proof.json"),
    Path("{{cookiecutter.project_slug}}/lock-cuda.txt"),
)
SECTION = re.compile(r"^## (\d+\.\d+\.\d+) \(.*\)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def run(*command: str, cwd: str = ".") -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    require(
        done.returncode == 0,
        f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}",
    )
    return done.stdout.strip()


def require(held: object, sentence: str) -> None:
    if not held:
        sys.exit(f"release: {sentence}.")


def library_version() -> str:
    return tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]["version"]


def newest_section() -> tuple[str, str]:
    found = SECTION.search(Path("CHANGELOG.md").read_text("utf-8"))
    return (found[1], found[2].strip()) if found else ("missing", "")


def check(version: str) -> None:
    valid = re.compile(r"\d+\.\d+\.\d+")
    require(
        valid.fullmatch(version),
        f"VERSION is {version!r}; three numbers are allowed: make release VERSION=1.2.3",
    )
    require(
        not run("git", "status", "--porcelain"),
        "the working tree has changes (git status): commit or stash them",
    )
    tags = [tag[1:] for tag in run("git", "tag").split() if valid.fullmatch(tag[1:])]
    newest = max([*tags, library_version()], key=Version)
    newer = Version(version) > Version(newest) or version == newest not in tags
    require(newer, f"VERSION {version} is not newer than {newest}: give a higher one")
    section, text = newest_section()
    require(
        section == version,
        f"CHANGELOG.md's newest section is {section}: write '## {version} (not released)'",
    )
    part = "### What you have to do"
    require(
        f"{part}\n" in text,
        f"section {version} of CHANGELOG.md lacks '{part}': write it, if only 'Nothing.'",
    )
    tried, pinned = json.loads(PROOF.read_text("utf-8"))["versions"], PINS.read_text("utf-8")
    others = [
        f"{name} {number}" for name, number in tried.items() if f"\n{name}=={number} " not in pinned
    ]
    others = " and ".join(others)
    require(
        not others, f"the table of models is of {others}, not of what is pinned: run python -m zoo"
    )


def commit(version: str) -> None:
    check(version)
    date = str(datetime.datetime.now(datetime.UTC).date())
    for name, pattern in (
        PLACES | {"CHANGELOG.md": rf"^(## {re.escape(version)} \()[^)]*"}
    ).items():
        value, text = date if name == "CHANGELOG.md" else version, Path(name).read_text("utf-8")
        Path(name).write_text(
            re.sub(pattern, rf"\g<1>{value}", text, count=1, flags=re.MULTILINE), "utf-8"
        )
    if run("git", "status", "--porcelain"):
        run("git", "commit", "--all", "--message", f"Release {version}")


def same_bytes(archive: Path, epoch: int) -> None:
    """Rewrites a .tar.gz so that it depends on its files' names and contents, and on `epoch`."""
    raw = io.BytesIO()
    with tarfile.open(archive) as old, tarfile.open(fileobj=raw, mode="w") as new:
        for entry in sorted(old, key=lambda entry: entry.name):
            same = tarfile.TarInfo(entry.name)
            same.type, same.size, same.mtime = entry.type, entry.size, epoch
            same.mode = 0o755 if entry.isdir() else 0o644
            new.addfile(same, old.extractfile(entry))
    archive.write_bytes(gzip.compress(raw.getvalue(), mtime=epoch))


def build(tag: str = "") -> None:
    version, epoch = library_version(), run("git", "log", "-1", "--format=%ct")
    require(
        tag in ("", f"v{version}"),
        f"the tag is {tag}, the version {version}: `make release` sets it, then tag",
    )
    os.environ |= {"SOURCE_DATE_EPOCH": epoch, "TZ": "UTC"}
    os.umask(0o022)
    shutil.rmtree(OUT, ignore_errors=True)
    (OUT / "dist").mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        run("git", "archive", "--format=tar", f"--output={folder}/source.tar", "HEAD")
        shutil.unpack_archive(folder + "/source.tar", folder + "/source", filter="data")
        require(
            Path("docs/reference.md").is_file(),
            "docs/reference.md is missing: `make docs` writes it",
        )
        shutil.copy("docs/reference.md", folder + "/source/docs")
        hook = "from setuptools import build_meta; import sys; build_meta.build_sdist(sys.argv[1])"
        run(sys.executable, "-c", hook, str(OUT / "dist"), cwd=folder + "/source")
    sdist, archive = (
        OUT / "dist" / f"dist_template-{version}.tar.gz",
        OUT / f"dist-template-{version}.zip",
    )
    same_bytes(sdist, int(epoch))
    wheel = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    run(*wheel, "--wheel-dir", str(OUT / "dist"), str(sdist))
    run(
        "git", "archive", "--format=zip", f"--prefix={archive.stem}/", f"--output={archive}", "HEAD"
    )
    (OUT / "NOTES.md").write_text(newest_section()[1] + "\n", "utf-8")
    files = sorted(path for path in OUT.rglob("*") if path.is_file())
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(OUT)}\n"
        for path in files
    ]
    (OUT / "SHA256SUMS").write_text("".join(sums), "utf-8")
    print(f"{''.join(sums)}release: {OUT} has version {version}. To publish it:\n")
    print(f"  git tag -a v{version} -m 'Release {version}'\n  git push origin HEAD v{version}")


if __name__ == "__main__":
    {"check": check, "commit": commit, "build": build}[sys.argv[1]](*sys.argv[2:])
