"""A copy of the repository, from which a test removes something, and tests that run in it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import ROOT

COPIED = ("src", "fake-cuda", "tests", "{{cookiecutter.project_slug}}")
COPIED += ("demonstrations", "docs", "hooks")
FILES = ("pyproject.toml", "cookiecutter.json")


def copied(folder: Path) -> Path:
    """Copies what tests read into `folder`, and returns it."""
    for name in COPIED:
        skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skipped)
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    return folder


def printed(folder: Path, *tests: str) -> str:
    """Runs tests in `folder`, until one fails; returns what pytest prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment["PYTHONPATH"] = str(folder / "src")
    flags = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not nightly"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *tests],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return f"{ended.stderr}\n{ended.stdout.strip()}"


def outcome(folder: Path, *tests: str) -> str:
    """Runs tests in `folder`; returns pytest's last line."""
    return printed(folder, *tests).splitlines()[-1]
