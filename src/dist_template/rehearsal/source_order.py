"""Reads the user's data source in two processes with different hash seeds, and compares the documents."""

from __future__ import annotations

import hashlib
import itertools
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ..errors import first_line
from . import code_locations

MAX_DOCUMENTS = 10_000
SEEDS = ("1", "2")  # PYTHONHASHSEED: sets iterate in another order


def difference(source: Any) -> tuple[int, str]:
    """Returns the number of documents compared, and their first difference; "" if there is none.

    Raises:
        RuntimeError: the source cannot be read in another process.
    """
    first, second = (_read(source, seed) for seed in SEEDS)
    for number, (a, b) in enumerate(itertools.zip_longest(first, second), 1):
        if a != b:
            names = [Path(each[0]).name if each else "missing" for each in (a, b)]
            return len(first), (
                f"document {number} is {names[0]} in one process and {names[1]} in another (PYTHONHASHSEED"
                f" {' and '.join(SEEDS)}): sort what {type(source).__name__}.documents iterates over"
                f" ({code_locations.of_function(source.documents)})"
            )
    return len(first), ""


def _read(source: Any, seed: str) -> list[tuple[str, str]]:
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = seed
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(_documents, source).result()
    except Exception as error:  # of pickling, of the source, or the process died
        kind = type(source).__name__
        raise RuntimeError(f"{kind} fails in another process: {type(error).__name__}: {first_line(error)}") from error
    finally:
        os.environ.pop("PYTHONHASHSEED")
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before


def _documents(source: Any) -> list[tuple[str, str]]:
    """Returns (name, hash of the text) of each document."""
    documents = itertools.islice(source.documents(), MAX_DOCUMENTS)
    return [(name, hashlib.sha256(text.encode(errors="replace")).hexdigest()) for name, text in documents]
