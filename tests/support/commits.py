"""git in a test's repositories, by somebody whom it knows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

WHO = {
    f"GIT_{role}_{key}": "ada@example.org"
    for role in ("AUTHOR", "COMMITTER")
    for key in ("NAME", "EMAIL")
}


@pytest.fixture(autouse=True)
def somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in WHO.items():
        monkeypatch.setenv(key, value)


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "-q", "-m", message)
