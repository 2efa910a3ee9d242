"""Runs ranks on fake devices, as workers.py does on CPUs. Its processes need the device's hooks before they import
torch, so another process starts them: one for all trainings, as long as this one lives."""

import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ..record import RunRecord
from ..workers import run_ranks
from .build import build


def run_on_devices(*args: Any, **options: Any) -> RunRecord:
    """`run_ranks` on fake devices, one for each rank; raises InputError if they cannot be built."""
    return _starter().submit(run_ranks, *args, **options).result()


@cache
def _starter() -> ProcessPoolExecutor:
    """Returns a process with the device's hooks."""
    hooks, before = build() / "fake_hooks.so", os.environ.get("LD_PRELOAD")
    starter = ProcessPoolExecutor(1, get_context("spawn"), initializer=_write_into, initargs=(hooks.with_name("log"),))
    os.environ["LD_PRELOAD"] = str(hooks)
    try:
        starter.submit(os.getpid).result()  # it has started, with this environment
    finally:
        os.environ.pop("LD_PRELOAD") if before is None else os.environ.update(LD_PRELOAD=before)
    return starter


def _write_into(log: Path) -> None:
    """Keeps what libraries say of the device at import, which each rank would repeat."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
