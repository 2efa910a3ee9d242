"""What `data.source.paths` matches: each file once, and links out of the folder only if allowed."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest

from dist_template import InputError
from dist_template.text import TextFiles
from dist_template.text.sources.records import matching


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """corpus/ with texts at three depths, and a file elsewhere."""
    for name in ("corpus/a.txt", "corpus/deep/b.txt", "corpus/deep/er/c.txt", "corpus/.hidden/d.txt", "other/e.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "corpus"


PATTERNS = ["*.txt", "**/*.txt", "**", "**/er/*", "*/*.txt", "**/deep/**/*.txt", "d**/*.txt", ".hidden/*.txt", "a.txt"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_without_links_it_is_what_glob_finds(pattern: str, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sorted({path for path in glob.glob(f"{tree}/{pattern}", recursive=True) if os.path.isfile(path)})
    assert [str(path) for path in matching([f"{tree}/{pattern}"], False)] == expected
    monkeypatch.chdir(tree)
    assert [str(tree / path) for path in matching([pattern], False)] == expected


@pytest.mark.timeout(20)
def test_links_in_a_circle_give_each_file_once(tree: Path) -> None:
    for number in range(3):  # glob.glob would find 3**40 paths
        (tree / f"loop{number}").symlink_to(tree, target_is_directory=True)
        (tree / "deep" / f"loop{number}").symlink_to(tree / "deep", target_is_directory=True)
    (tree / "deep" / "again.txt").symlink_to(tree / "a.txt")
    os.link(tree / "a.txt", tree / "deep" / "er" / "hard.txt")
    found = [path.relative_to(tree).as_posix() for path in matching([f"{tree}/**/*.txt"], False)]
    assert found == ["a.txt", "deep/b.txt", "deep/er/c.txt"]


def test_a_file_has_its_own_name_and_not_that_of_a_link(tree: Path) -> None:
    (tree / "deep" / "er" / "link").symlink_to(tree / "z" / "y", target_is_directory=True)
    (tree / "z" / "y").mkdir(parents=True)
    (tree / "z" / "y" / "f.txt").write_text("f")
    assert matching([f"{tree}/**/f.txt"], False) == [tree / "z" / "y" / "f.txt"]


@pytest.mark.timeout(20)
def test_a_link_out_of_the_folder_is_refused_before_its_files_are_listed(tree: Path) -> None:
    (tree / "root").symlink_to("/", target_is_directory=True)
    with pytest.raises(InputError, match="a link leads from .*root to /, outside of"):
        matching([f"{tree}/**/*.no-such-ending"], False)


@pytest.mark.parametrize("pattern", ["**/*.txt", "*/*.txt", "**/*"])
@pytest.mark.parametrize("to", ["other", "other/e.txt"])
def test_a_link_out_of_the_folder_is_refused_unless_allowed(pattern: str, to: str, tree: Path) -> None:
    (tree / "deep" / "link.txt").symlink_to(tree.parent / to)
    (tree / "link").symlink_to(tree.parent / "other", target_is_directory=True)
    reason = r"link leads from .*link.* to .*other.*data.source.follow_links to true"
    with pytest.raises(InputError, match=reason):
        matching([f"{tree}/{pattern}"], False)
    found = matching([f"{tree}/{pattern}"], True)
    assert {path.name for path in found} & {"e.txt", "link.txt"}
    named = tree / "deep" / "link.txt"
    if named.is_file():
        assert matching([str(named)], False) == [named]


def test_the_key_names_a_cache_of_its_own_only_if_it_is_set() -> None:
    assert TextFiles(["a"]).spec() == {"class": "TextFiles", "paths": ["a"], "separator": None}
    assert TextFiles(["a"], follow_links=True).spec()["follow_links"] is True
