"""Trainings that save, and the moments of a save at which a rank is killed."""

import os
import pickle
import shutil
import signal
from itertools import count
from pathlib import Path
from typing import Any

import torch

from dist_template import processes
from dist_template.checkpoint import commit, manifest
from dist_template.wings.rehearse.record import RunRecord
from tests.support.runs import Workers
from tests.support.strategies import ARGS, flags_of

# The functions by which a save changes files or waits for other ranks.
OPERATIONS: dict[str, Any] = {
    "save": torch,
    "dump": pickle,
    "write_text": Path,
    "mkdir": Path,
    "rename": Path,
    "fsync": os,
    "rmtree": shutil,
    "to_rank_zero": processes,
}
FILE_ARGUMENT = {"save": 1, "write_text": 0}


def crash(rank: int, number: int, step: int, operation: str = "") -> None:
    """In each worker: kills `rank` with SIGKILL before its `number`th operation of saving `step`.

    A file that is written counts twice: before the writing, and when half of it is written.
    `operation` is the only one of OPERATIONS that counts."""
    code: Any = commit
    begin, operations = code.begin, count(1)

    def killing(name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            kill_if_reached()
            result = real(*args, **options)
            if name in FILE_ARGUMENT:
                kill_if_reached(args[FILE_ARGUMENT[name]])
            return result

        return call

    def kill_if_reached(written: Any = None) -> None:
        if next(operations) == number:
            if isinstance(written, str | Path):
                os.truncate(written, os.path.getsize(written) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def begin_armed(path: Path, *args: Any) -> Path:
        if manifest.step_of(path) == step:
            for name, owner in OPERATIONS.items():
                if operation in ("", name):
                    setattr(owner, name, killing(name, getattr(owner, name)))
        return begin(path, *args)

    if int(os.environ["RANK"]) == rank:
        code.begin = begin_armed


class Trainings:
    """Trainings on a few processes, by the same flags."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.folder, self.flags = folder, flags
        Workers(1).run(["prepare", *flags], folder / "prepare").check()

    def __call__(
        self, name: str, strategy: str, *extra: str, processes: int = 2, **options: Any
    ) -> RunRecord:
        """One `fit` of the run `name`; a further one relaunches it."""
        flags = [*self.flags, *flags_of(strategy), f"--trainer.devices={processes}"]
        if strategy == "zero3":  # or so small a model would stay whole on every rank
            flags.append(f"{ARGS}.param_persistence_threshold=16")
        record = self.folder / f"{name}-{len(list(self.folder.iterdir()))}"
        return Workers(processes).run(["fit", *flags, *extra], record, run_id=name, **options)
