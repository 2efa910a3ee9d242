"""Reads the user's data source twice, with different hash seeds, and compares the documents."""

from __future__ import annotations

import hashlib
import itertools
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ...errors import first_line
from . import code_locations
from .report import Result
from .workers import hashing_with

NAME, EXPECTED = "the source keeps its order", "two readings are equal"
MAX_DOCUMENTS = 10_000
SEEDS = ("1", "2")  # of PYTHONHASHSEED: the order of a set depends on it


def check(source: Any) -> Result:
    """Returns the check's result; it is `limit` if another process cannot read the source."""
    started = time.perf_counter()
    try:
        first, second = (_read(source, seed) for seed in SEEDS)
    except Exception as error:  # of pickling, of the source, or because the process died
        reason = f"{type(error).__name__}: {first_line(error)}"
        why = f"{type(source).__name__} fails in another process: {reason}"
        return Result(NAME, EXPECTED, "not possible here", "limit", why)
    cause = _difference(source, first, second)
    seconds = time.perf_counter() - started
    if cause:
        return Result(NAME, EXPECTED, "another order", "FAIL", "", seconds, cause)
    return Result(NAME, EXPECTED, f"{len(first)} documents, read twice", "pass", "", seconds)


def _difference(source: Any, first: list[tuple[str, str]], second: list[tuple[str, str]]) -> str:
    for number, (a, b) in enumerate(itertools.zip_longest(first, second), 1):
        if a != b:
            names = [Path(document[0]).name if document else "missing" for document in (a, b)]
            return (
                f"document {number} is {names[0]} in one process and {names[1]} in another"
                f" (PYTHONHASHSEED {' and '.join(SEEDS)}): sort what"
                f" {type(source).__name__}.documents iterates over"
                f" ({code_locations.of_function(source.documents)})"
            )
    return ""


def _read(source: Any, seed: str) -> list[tuple[str, str]]:
    with hashing_with(seed), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_documents, source).result()


def _documents(source: Any) -> list[tuple[str, str]]:
    """Returns (name, hash of the text) of each document."""
    found = []
    for name, text in itertools.islice(source.documents(), MAX_DOCUMENTS):
        found.append((name, hashlib.sha256(text.encode(errors="replace")).hexdigest()))
    return found
