"""Whatever files a checkpoint has, any one change to them is detected."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.library import commit, manifest

NAMES = st.from_regex(r"[a-z_0-9]{1,8}(/[a-z_0-9]{1,8}){0,2}\.(pt|distcp)", fullmatch=True)
CONTENTS = st.binary(max_size=64)
Damage = Callable[[Path, int, int], None]


def change_byte(file: Path, position: int, value: int) -> None:
    """Appends a byte to an empty file."""
    content = bytearray(file.read_bytes() or b"\0")
    content[position % len(content)] ^= 1 + value % 255
    file.write_bytes(content)


def truncate(file: Path, position: int, value: int) -> None:
    """Removes an empty file."""
    content = file.read_bytes()
    if content:
        file.write_bytes(content[: position % len(content)])
    else:
        file.unlink()


def extend(file: Path, position: int, value: int) -> None:
    file.write_bytes(file.read_bytes() + bytes([value % 256]) * (1 + position % 9))


def remove(file: Path, position: int, value: int) -> None:
    file.unlink()


def add(file: Path, position: int, value: int) -> None:
    (file.parent / f"{position}.pt").write_bytes(bytes(value % 9))


@pytest.fixture(scope="module", autouse=True)
def no_flushes() -> Iterator[None]:
    """A flush to the disk takes longer than everything else here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "_flush", lambda path: None)
        yield


@settings(max_examples=150, deadline=None)
@given(
    files=st.dictionaries(NAMES, CONTENTS, max_size=6),
    damage=st.sampled_from([change_byte, truncate, extend, remove, add]),
    which=st.integers(0, 6),
    position=st.integers(10**9, 10**10),  # no generated file has such a name
    value=st.integers(0, 1 << 16),
)
def test_any_one_damage_is_detected(
    files: dict[str, bytes], damage: Damage, which: int, position: int, value: int
) -> None:
    """The manifest itself is among the files that are damaged."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / manifest.name(7)
        temporary = commit.begin(path)
        for name, content in files.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(content)
        commit.finish(path, {"step": 7}, None)
        assert manifest.damage(path) is None and manifest.torn(path) is None
        assert manifest.read(path)["files"].keys() == files.keys()
        candidates = [*sorted(files), manifest.MANIFEST]
        damage(path / candidates[which % len(candidates)], position, value)
        assert manifest.damage(path), "the damage was not detected"
