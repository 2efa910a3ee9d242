"""Fixtures of the library's tests: a corpus, a small model's flags, no process group left."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainer_dev.data import DataModule

from dist_template.text import Bytes, TextFiles
from tests.support.numerics import guarded  # noqa: F401  (a fixture)
from tests.support.parity import train  # noqa: F401  (a fixture)
from tests.support.real_weights import smollm2  # noqa: F401  (a fixture)
from tests.support.runs import OF_ANOTHER_RUN, SENTENCES, small
from tests.support.stores import s3  # noqa: F401  (a fixture)

torch.set_num_threads(1)  # small tensors; threads would wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in started processes too, where they spin meanwhile


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: a worker takes a whole file, and short ones fill the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes what a training in this process leaves: the next would take it for a launcher's."""
    for name in OF_ANOTHER_RUN:
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    yield
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()  # and DeepSpeed's references to it
    elif dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 60 short texts of a few repeated words, which a small model learns soon."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(60):
        words = "the quick brown fox jumps over the lazy dog. " * (4 + number % 5)
        (folder / f"{number:02}.txt").write_text(f"document {number}: {words}", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def flags(corpus: Path, cache: Path, tmp_path: Path) -> list[str]:
    """A complete small training on one CPU process, writing into this test's own folder."""
    return small(corpus, cache, tmp_path)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """40 documents, the last a duplicate of the first."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        text = f"{number % 39}\n" + SENTENCES * (1 + number % 39 % 5)
        (folder / f"{number:02}.txt").write_text(text, "utf-8")
    return folder


@pytest.fixture
def data(texts: Path, tmp_path: Path) -> DataModule:
    shares: Any = {"validation_share": 0.2, "test_share": 0.2}
    source, cache = TextFiles([f"{texts}/*.txt"]), str(tmp_path / "cache")
    return DataModule(source, Bytes(), seq_len=32, cache_dir=cache, **shares)
