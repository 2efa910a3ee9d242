"""Short trainings that save after each step, and what ends a rank inside a save."""

from __future__ import annotations

import io
import itertools
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from dist_template.checkpoint import commit, manifest
from dist_template.checkpoint.formats import read_full
from dist_template.rehearsal.record import RunRecord
from tests.support.runs import SMALL_LLAMA, Workers
from tests.support.strategies import flags_of

STEPS = 8
EXIT_CODE = 99  # of a rank that `crash` ends


def die(*_: Any) -> None:
    os._exit(EXIT_CODE)


def crash(point: str, rank: int, at_save: int) -> None:
    """In each worker: end `rank`'s process at `point` of its `at_save`th save, as kill -9 would."""
    if int(os.environ["RANK"]) != rank:
        return
    code: Any = commit
    begin, saves = code.begin, itertools.count(1)

    def counted(path: Path, group: Any = None) -> Path:
        aside = begin(path, group)
        if next(saves) == at_save:
            _arm(code, point, path)
        return aside

    code.begin = counted


def _arm(code: Any, point: str, path: Path) -> None:
    """`code` is commit.py."""
    flush, beside, agree, calls = code._flush, code._beside, code._agree, itertools.count(1)
    kind, _, file = point.partition(" ")
    if kind == "begun":
        die()
    elif kind in ("before", "write"):
        _die_at(file, half_way=kind == "write")
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
        code._beside = lambda file, suffix: die() if suffix == "old" else beside(file, suffix)
    elif kind == "renamed":
        code._flush = lambda file: die() if file == path.parent else flush(file)
    else:  # "waiting" for rank 0, which renames meanwhile
        code._agree = lambda *args: die() if next(calls) == 3 else agree(*args)


def _die_at(name: str, half_way: bool) -> None:
    """When a file of this name is about to be written, or half of it is."""
    save, dump, write_text = torch.save, pickle.dump, Path.write_text

    def dying_save(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        is_open = hasattr(file, "write")
        if not str(getattr(file, "name", ".distcp") if is_open else file).endswith(name):
            return save(value, file, *args, **kwargs)
        if half_way:
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
    libraries[0].save, libraries[1].dump, libraries[2].write_text = dying_save, dying_dump, dying_text


# Of each rank, in the order of time; what each strategy's ranks write.
FILES = {
    "ddp": (["checkpoint.pt"], []),
    "fsdp2": ([".distcp", ".metadata", "meta.pt"], [".distcp"]),
    "zero1": (["model_states.pt", "optim_states.pt", "latest"], ["optim_states.pt"]),
    "zero2": (["model_states.pt", "optim_states.pt", "latest"], ["optim_states.pt"]),
    "zero3": (["model_states.pt", "optim_states.pt", "latest"], ["model_states.pt", "optim_states.pt"]),
}
POINTS = (
    ["written", "hashed", "manifest", "renaming", "renamed"],
    ["begun", "written", "hashed", "waiting", "committed"],
)
COMMITTED = {"renamed", "waiting", "committed"}  # at these the checkpoint stands already


def points(strategy: str) -> list[tuple[str, int]]:
    """(point, rank), those of rank 0 and of rank 1 in turn."""
    lists = [
        [f"write {file}" for file in files] + list(later) for files, later in zip(FILES[strategy], POINTS, strict=True)
    ]
    turns = itertools.zip_longest(*lists)
    return [(point, rank) for turn in turns for rank, point in enumerate(turn) if point]


class Trainings:
    """Short trainings of one tiny model on two processes, a checkpoint after each step."""

    def __init__(self, folder: Path, corpus: Path, cache: Path) -> None:
        self.folder = folder
        self.flags = [
            f"--run.root={folder / 'runs'}", "--run.report=false",
            "--data.source=TextFiles", f"--data.source.paths=[{corpus}/*.txt]",
            "--data.tokenizer=Bytes", f"--data.cache_dir={cache}", "--data.seq_len=32", "--data.global_batch_size=4",
            "--data.micro_batch_size=2", "--data.validation_share=0.15", "--data.test_share=0.15", "--data.prompts=[]",
            f"--model.architecture={SMALL_LLAMA}", "--trainer.accelerator=cpu", "--trainer.devices=2",
            f"--trainer.max_steps={STEPS}", "--trainer.limit_val_batches=0", "--trainer.logger=false",
            "--last_checkpoint.every_n_steps=1",
        ]  # fmt: skip
        with Workers(1) as workers:
            workers.run(["prepare", *self.flags], folder / "prepare").check()
        self._whole: dict[str, Path] = {}

    def run(self, strategy: str, run_id: str, *flags: str, **options: Any) -> RunRecord:
        """A command on two processes; one of the same `run_id` as before is a relaunch of that run."""
        number = len(list(self.folder.glob(f"{run_id}-*")))
        chosen = [*flags_of(strategy), *flags]
        if strategy == "zero3":  # or so small a model would stay whole on every rank
            chosen.append("--trainer.strategy.init_args.param_persistence_threshold=16")
        with Workers(2) as workers:
            record = self.folder / f"{run_id}-{number}"
            return workers.run(["fit", *self.flags, *chosen], record, run_id=run_id, timeout_s=60, **options)

    def whole(self, strategy: str) -> Path:
        """The checkpoints of every step of a training that nothing disturbed."""
        if strategy not in self._whole:
            record = self.run(strategy, f"whole-{strategy}", f"--last_checkpoint.keep={STEPS}").check()
            self._whole[strategy] = record.run / "checkpoints"
        return self._whole[strategy]


def assert_same(path: Path, other: Path) -> None:
    """Weights, moments, counters and the data's position of two checkpoints, bit for bit."""
    one, two = read_full(path), read_full(other)
    for key in ("state_dict", "optimizer_states", "DataModule", "global_step", "lr_schedulers", "random_state"):
        assert equal(one[key], two[key]), key


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(equal, one, two))
    return one == two
