"""A full disk while the cache is written: one sentence, nothing left behind, the older cache untouched."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer_dev.data import DataModule

from dist_template import InputError
from dist_template.text import Bytes, TextFiles
from tests.support.runs import PACKAGE, SENTENCES, disk, quiet

PREPARE = f"""
import sys
from {PACKAGE}.data import DataModule
from dist_template.errors import InputError
from dist_template.text.sources.documents import TextFiles
from dist_template.text.tokenizers import Bytes
try:
    DataModule(TextFiles([sys.argv[1]]), Bytes(), cache_dir=sys.argv[2]).prepare()
except InputError as error:
    sys.exit(str(error))
"""


def prepare_in_a_child(texts: Path, cache_dir: Path, limit: int | None = None) -> str:
    """What `prepare` says on stderr, in a process that may not write files larger than `limit` bytes."""

    def lower() -> None:
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-c", PREPARE, f"{texts}/*.txt", str(cache_dir)]
    env = os.environ
    return subprocess.run(command, env=env, capture_output=True, text=True, preexec_fn=lower, check=False).stderr


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "disk", "256k") as folder:
        yield folder


def test_a_full_disk_leaves_nothing_behind_and_the_older_cache_usable(texts: Path, tiny_disk: Path) -> None:
    data = DataModule(
        TextFiles([f"{texts}/*.txt"]),
        Bytes(),
        32,
        validation_share=0.2,
        test_share=0.2,
        cache_dir=str(tiny_disk),
    )
    folder = data.prepare(report=quiet).folder
    before = {path.name: path.read_bytes() for path in folder.glob("*.bin")}
    (texts / "large.txt").write_text(SENTENCES * 5000, encoding="utf-8")
    with pytest.raises(InputError, match="is full and nothing was kept"):
        data.prepare(report=quiet)
    assert sorted(path.name for path in tiny_disk.iterdir()) == [folder.name, folder.name + ".lock"]
    assert {path.name: path.read_bytes() for path in folder.glob("*.bin")} == before
    (texts / "large.txt").unlink()
    data.require()


@pytest.mark.slow
def test_a_file_that_cannot_grow_is_reported_as_a_full_disk(texts: Path, tmp_path: Path) -> None:
    (texts / "large.txt").write_text(SENTENCES * 5000, encoding="utf-8")
    cache_dir = tmp_path / "cache"
    assert "is full and nothing was kept" in prepare_in_a_child(texts, cache_dir, limit=100_000)
    assert [path.suffix for path in cache_dir.iterdir()] == [".lock"]
