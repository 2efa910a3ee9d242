"""The moments of a save at which a rank is killed, for a fake training (fake_saves.py) or a real
one (saves.py)."""

from __future__ import annotations

import io
import itertools
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from tests.support.library import commit, manifest

EXIT_CODE = 99  # of a rank that `crash` ends


def die(*_: Any) -> None:
    os._exit(EXIT_CODE)


def crash(point: str, rank: int, at_save: int) -> None:
    """In each worker: ends the process of `rank` at `point` of its `at_save`th save, as kill -9
    would."""
    if int(os.environ["RANK"]) != rank:
        return
    code: Any = commit
    begin, saves = code.begin, itertools.count(1)

    def counted(path: Path, group: Any = None) -> Path:
        temporary = begin(path, group)
        if next(saves) == at_save:
            _arm(code, point, path)
        return temporary

    code.begin = counted


def _arm(code: Any, point: str, path: Path) -> None:
    """`code` is commit.py."""
    flush, hidden, agree, calls = code._flush, code._hidden, code._agree, itertools.count(1)
    kind, _, file = point.partition(" ")
    if kind == "begun":
        die()
    elif kind in ("before", "write"):
        _die_at(file, halfway=kind == "write")
    elif kind == "written":
        code._files = die
    elif kind in ("hashed", "committed"):
        name = {"hashed": "_flush_and_hash", "committed": "finish"}[kind]
        real = getattr(code, name)
        setattr(code, name, lambda *args: (real(*args), die()))
    elif kind == "manifest":  # it is written, and not flushed
        at = path.parent / f".{path.name}.tmp" / manifest.MANIFEST
        code._flush = lambda file: die() if file == at else flush(file)
    elif kind == "renaming":
        code._commit = lambda *args: _die_before_rename(*args)
    elif kind == "renamed":
        code._flush = lambda file: die() if file == path.parent else flush(file)
    elif (
        kind == "replacing"
    ):  # the checkpoint of the same name has been renamed, and the new one has not
        code._hidden = lambda file, suffix: _die_after_rename(hidden(file, suffix), suffix)
    else:  # "waiting" for rank 0, which renames meanwhile
        code._agree = lambda *args: die() if next(calls) == 3 else agree(*args)


def _die_before_rename(temporary: Path, path: Path, about: dict[str, Any]) -> None:
    (temporary / manifest.MANIFEST).write_text(manifest.rendered(about), encoding="utf-8")
    die()


def _die_after_rename(old: Path, suffix: str) -> Path:
    if suffix == "old":
        rename: Any = Path.rename

        def renamed(self: Path, target: Path) -> None:
            rename(self, target)
            die()

        libraries: Any = Path
        libraries.rename = renamed
    return old


def _die_at(name: str, halfway: bool) -> None:
    """When a file of this name is about to be written, or half of it is written."""
    save, dump, write_text = torch.save, pickle.dump, Path.write_text

    def dying_save(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        is_open = hasattr(file, "write")
        if not str(getattr(file, "name", ".distcp") if is_open else file).endswith(name):
            return save(value, file, *args, **kwargs)
        if halfway:
            content = io.BytesIO()
            save(value, content)
            stream = file if is_open else Path(file).open("wb")  # noqa: SIM115
            stream.write(content.getvalue()[: content.tell() // 2])
            stream.flush()
        die()

    def dying_dump(value: Any, file: Any, *args: Any) -> None:
        if str(getattr(file, "name", "")).endswith(f"{name}.tmp"):
            die()
        dump(value, file, *args)

    def dying_text(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.name == name:
            die()
        write_text(self, *args, **kwargs)

    libraries: Any = (torch, pickle, Path)
    libraries[0].save, libraries[1].dump, libraries[2].write_text = (
        dying_save,
        dying_dump,
        dying_text,
    )


# What each strategy's ranks write: rank 0, rank 1.
FILES = {
    "ddp": (["checkpoint.pt"], []),
    "fsdp2": ([".distcp", ".metadata", "meta.pt"], [".distcp"]),
    "zero": (
        ["model_states.pt", "optim_states.pt", "latest"],
        ["model_states.pt", "optim_states.pt"],
    ),
}
POINTS = (
    ["written", "hashed", "manifest", "renaming", "renamed"],
    ["begun", "written", "hashed", "waiting", "committed"],
)
COMMITTED = {"renamed", "waiting", "committed"}  # at these the checkpoint exists already


def points(strategy: str) -> list[tuple[str, int]]:
    """Returns (point, rank) in the order of time."""
    of_ranks = []
    for files, later in zip(FILES[strategy], POINTS, strict=True):
        of_ranks.append([f"write {file}" for file in files] + list(later))
    turns = itertools.zip_longest(*of_ranks)
    return [(point, rank) for turn in turns for rank, point in enumerate(turn) if point]
