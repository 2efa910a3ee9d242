"""What `data.source.paths` matches: each file once."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest

from dist_template.text.sources.records import matching


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """corpus/ with texts at three depths, and a file elsewhere."""
    for name in (
        "corpus/a.txt",
        "corpus/deep/b.txt",
        "corpus/deep/er/c.txt",
        "corpus/.hidden/d.txt",
        "other/e.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "corpus"


PATTERNS = [
    "*.txt", "**/*.txt", "**", "**/er/*", "*/*.txt", "**/deep/**/*.txt", "d**/*.txt",
    ".hidden/*.txt", "a.txt",
]  # fmt: skip


def test_without_links_it_is_what_glob_finds(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    for pattern in PATTERNS:
        files = {
            path for path in glob.glob(f"{tree}/{pattern}", recursive=True) if os.path.isfile(path)
        }
        assert [str(path) for path in matching([f"{tree}/{pattern}"])] == sorted(files), pattern
        assert [str(tree / path) for path in matching([pattern])] == sorted(files), pattern


def test_links_in_a_circle_give_each_file_once(tree: Path) -> None:
    (tree / "loop").symlink_to(tree, target_is_directory=True)
    (tree / "deep" / "again.txt").symlink_to(tree / "a.txt")
    found = [path.relative_to(tree).as_posix() for path in matching([f"{tree}/**/*.txt"])]
    assert found == ["a.txt", "deep/b.txt", "deep/er/c.txt"]
