"""Runs ranks on fake GPUs: `run_on_devices` is `run_ranks` with a device for each rank.

Ranks are forked from a process that has imported all libraries (see workers.py). Python has one
such process for each of ours, and this one's has no devices; so a starter process, made once, has
another one, which installs the devices before it imports the libraries (see worker.py)."""

import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import fake_cuda

from ....errors import InputError
from ..record import RunRecord
from ..workers import run_ranks
from . import VARIABLE


def build() -> Path:
    """Compiles the devices if needed; returns their folder. Raises InputError where they do not
    work."""
    try:
        return fake_cuda.build()
    except fake_cuda.Unsupported as error:
        raise InputError(str(error)) from error


def run_on_devices(*args: Any, **options: Any) -> RunRecord:
    """`run_ranks` on fake devices, one for each rank; raises InputError where they do not work."""
    return _starter().submit(run_ranks, *args, **options).result()


@cache
def _starter() -> ProcessPoolExecutor:
    log = build() / "log"
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=_prepare, initargs=(log,))


def _prepare(log: Path) -> None:
    """Marks the process, and redirects its stderr to `log`: libraries complain of the device when
    they are imported."""
    os.environ[VARIABLE] = "1"
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
