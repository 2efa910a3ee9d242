"""Runs ranks on fake devices, as workers.py does on CPUs. They need the device's hooks before they import torch, so one
process with these starts them, as long as this one lives."""

import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ..record import RunRecord
from ..workers import run_ranks
from .build import build


def run_on_devices(*args: Any, **options: Any) -> RunRecord:
    """`run_ranks` on fake devices, one for each rank; raises InputError if they cannot be built."""
    return _starter().submit(run_ranks, *args, **options).result()


@cache
def _starter() -> ProcessPoolExecutor:
    hooks = build() / "fake_hooks.so"
    starter = ProcessPoolExecutor(1, get_context("spawn"), initializer=_write_into, initargs=(hooks.with_name("log"),))
    with patch.dict(os.environ, LD_PRELOAD=str(hooks)):
        starter.submit(os.getpid).result()  # it has started
    return starter


def _write_into(log: Path) -> None:
    """Keeps what libraries say of the device at import, which each rank would repeat."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
