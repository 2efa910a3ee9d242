"""Reads the user's data source twice, with different hash seeds, and compares the documents."""

from __future__ import annotations

import hashlib
import itertools
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import first_line
from . import code_locations
from .report import NOT_POSSIBLE, Result, Verdict
from .workers import hashing_with

if TYPE_CHECKING:
    from ...text import Source

NAME, EXPECTED = "the source keeps its order", "two readings are equal"
MAX_DOCUMENTS = 10_000
SEEDS = ("1", "2")  # of PYTHONHASHSEED: the order of a set depends on it


def check(source: Source) -> Result:
    """Returns the check's result; it is `limit` if another process cannot read the source."""
    started, name = time.perf_counter(), type(source).__name__
    readings: list[list[tuple[str, str]]] = []
    try:
        for seed in SEEDS:
            context = get_context("spawn")
            with hashing_with(seed), ProcessPoolExecutor(1, mp_context=context) as pool:
                readings.append(pool.submit(_hashes, source).result())
    except Exception as error:  # of pickling, of the source, or because the process died
        why = f"{name} fails in another process: {type(error).__name__}: {first_line(error)}"
        return Result(NAME, EXPECTED, NOT_POSSIBLE, "limit", why)
    got, cause = f"{len(readings[0])} documents, read twice", ""
    verdict: Verdict = "pass"
    missing = ("missing", "")
    for number, pair in enumerate(itertools.zip_longest(*readings, fillvalue=missing), 1):
        if pair[0] != pair[1]:
            one, other = (Path(document).name for document, _ in pair)
            what = f"document {number} is {one} in one process and {other} in another"
            code = f"{name}.documents iterates over ({code_locations.of_function(source.documents)})"
            cause = f"{what} (PYTHONHASHSEED {' and '.join(SEEDS)}): sort what {code}"
            got, verdict = "another order", "FAIL"
            break
    return Result(NAME, EXPECTED, got, verdict, "", time.perf_counter() - started, cause)


def _hashes(source: Source) -> list[tuple[str, str]]:
    """Returns (name, hash of the text) of each document."""
    found = []
    for name, text in itertools.islice(source.documents(), MAX_DOCUMENTS):
        found.append((name, hashlib.sha256(text.encode(errors="replace")).hexdigest()))
    return found
