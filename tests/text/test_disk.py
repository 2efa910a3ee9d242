"""A full disk while the cache is written: one sentence, nothing left behind, the older cache untouched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer_dev.data import DataModule

from dist_template import InputError
from dist_template.text import Bytes, TextFiles
from tests.support.runs import SENTENCES, disk, quiet


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "disk", "256k") as folder:
        yield folder


def test_a_full_disk_leaves_nothing_behind_and_the_older_cache_usable(
    texts: Path, tiny_disk: Path
) -> None:
    data = DataModule(
        TextFiles([f"{texts}/*.txt"]), Bytes(), 32, validation_share=0.2, test_share=0.2,
        cache_dir=str(tiny_disk),
    )  # fmt: skip
    folder = data.prepare(report=quiet).folder
    before = {path.name: path.read_bytes() for path in folder.glob("*.bin")}
    (texts / "large.txt").write_text(SENTENCES * 5000, encoding="utf-8")
    with pytest.raises(InputError, match="is full and nothing was kept"):
        data.prepare(report=quiet)
    assert sorted(path.name for path in tiny_disk.iterdir()) == [folder.name, folder.name + ".lock"]
    assert {path.name: path.read_bytes() for path in folder.glob("*.bin")} == before
    (texts / "large.txt").unlink()
    data.require()
