"""Reads the user's data source in two processes with different hash seeds, and compares the documents."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import pickle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import first_line
from . import code_locations

MAX_DOCUMENTS = 10_000
SEEDS = ("1", "2")  # PYTHONHASHSEED: sets iterate in another order
Document = tuple[str, str]  # name, hash of the text


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


def _read(source: Any, seed: str) -> list[Document]:
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = seed
    ours, theirs = multiprocessing.Pipe(duplex=False)
    try:
        process = multiprocessing.get_context("spawn").Process(target=_send, args=(theirs, source))
        process.start()
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise RuntimeError(f"{type(source).__name__} cannot be sent to a process: {first_line(error)}") from error
    finally:
        os.environ.pop("PYTHONHASHSEED")
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        answer = "its process ended without an answer"
    process.join()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


def _send(connection: Connection, source: Any) -> None:
    try:
        documents = itertools.islice(source.documents(), MAX_DOCUMENTS)
        answer: Any = [(name, hashlib.sha256(text.encode(errors="replace")).hexdigest()) for name, text in documents]
    except Exception as error:  # the parent process reports it
        answer = f"{type(error).__name__}: {first_line(error)}"
    connection.send(answer)
