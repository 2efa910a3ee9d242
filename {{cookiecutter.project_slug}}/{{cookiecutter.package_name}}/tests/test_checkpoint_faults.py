"""Trainings that are killed inside a save, or whose disk fills up, on every rank and under every kind of strategy."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import random
import resource
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback

from ..checkpoint import commit, manifest
from ..checkpoint import resume as loading
from ..checkpoint.formats import read_full
from ..errors import InputError
from ..rehearsal.record import RunRecord
from ..rehearsal.workers import Workers
from .conftest import CONFIGS, SMALL_LLAMA
from .test_checkpoint_commit import damage

pytestmark = pytest.mark.slow

STRATEGIES = ["ddp", "fsdp2", "zero1", "zero2", "zero3"]
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
            f"--run.root={folder / 'runs'}", "--data.source=TextFiles", f"--data.source.paths=[{corpus}/*.txt]",
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
        chosen = [f"--config={CONFIGS}/strategy/{strategy}.yaml", *flags]
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


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("faults"), corpus, cache)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than pytest's, where this machine has one that anyone may write to."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev or not os.access(shm, os.W_OK):
        yield tmp_path
        return
    folder = shm / f"checkpoints-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def assert_same(path: Path, other: Path) -> None:
    """Weights, moments, counters and the data's position of two checkpoints, bit for bit."""
    one, two = read_full(path), read_full(other)
    for key in ("state_dict", "optimizer_states", "DataModule", "global_step", "lr_schedulers", "random_state"):
        assert _equal(one[key], two[key]), key


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_equal(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(_equal, one, two))
    return one == two


# ---- killed inside a save ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_kill_at_any_point_of_a_save_leaves_the_newest_valid_checkpoint_to_go_on_from(
    train: Trainings, elsewhere: Path, strategy: str
) -> None:
    """Each launch goes on from what the kill before has left, and is killed at the next point; the last one ends."""
    folder, step = elsewhere / strategy, 1
    launch = partial(train.run, strategy, f"killed-{strategy}", f"--last_checkpoint.dirpath={folder}")
    for number, (point, rank) in enumerate(points(strategy)):
        at_save = 2 if number == 0 else 1  # step 1 is saved in peace, then a kill in each launch
        record = launch(prelude=partial(crash, point, rank, at_save))
        assert record.answers[rank] == f"killed: exit code {EXIT_CODE}", (point, rank, record.error)
        step += point in COMMITTED
        newest = commit.newest(folder)
        assert newest is not None and newest.name == manifest.name(step), (point, rank)
        assert commit.verify(newest) is None, (point, rank)
        assert_same(newest, train.whole(strategy) / newest.name)
    assert step < STEPS - 1, "or the last launch had nothing to do"
    launch().check()
    assert_same(folder / manifest.name(STEPS), train.whole(strategy) / manifest.name(STEPS))
    left = sorted(path.name for path in folder.iterdir())
    assert left == [manifest.name(STEPS - 1), manifest.name(STEPS)], "nothing of the killed saves is left"


def in_place_and_unverified() -> None:
    """As without this package: one name, written over in place. Rank 1 is killed when it comes to its part of step 3."""

    def begin(path: Path, group: Any = None) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        return path

    code: Any = commit
    names: Any = manifest
    names.name = lambda step, best=False: "last.ckpt"
    code.begin = begin
    code.finish = lambda *args: commit._agree(None, None, None)
    crash("before optim_states.pt", rank=1, at_save=3)


def test_without_the_guard_a_killed_save_is_a_mixture_of_two_steps(train: Trainings) -> None:
    """What the guard is for. DeepSpeed's parts of two steps load, without a word, as weights of neither."""
    record = train.run("zero2", "mixed", prelude=in_place_and_unverified)
    assert record.answers[1] == f"killed: exit code {EXIT_CODE}"
    mixed = read_full(record.run / "checkpoints" / "last.ckpt")
    for path in manifest.found(train.whole("zero2")):
        assert not _equal(mixed["state_dict"], read_full(path)["state_dict"]), path


# ---- damaged afterwards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forty_damages_to_a_trained_checkpoint_are_refused(train: Trainings, tmp_path: Path, strategy: str) -> None:
    """200 over the five strategies."""
    draw = random.Random(strategy)
    path = train.whole(strategy) / manifest.name(STEPS)
    for number in range(40):
        copy = shutil.copytree(path, tmp_path / str(number) / path.name)
        done = damage(copy, draw)
        with pytest.raises(InputError, match="is damaged: its "):
            commit.agreed(copy)
            pytest.fail(done)


def unverified() -> None:
    """In each worker: what is there is loaded."""
    code: Any = loading
    code.agreed = lambda path: manifest.found(path)[0]


@pytest.mark.parametrize("guarded", [True, False])
def test_all_ranks_pass_over_a_damaged_checkpoint_together(train: Trainings, guarded: bool) -> None:
    """A bit of a weight is changed, which rank 1 alone may notice; without the guard training goes on from it."""
    whole = train.whole("ddp")
    folder = train.folder / f"damaged-{guarded}"
    for step in (STEPS - 2, STEPS - 1):
        shutil.copytree(whole / manifest.name(step), folder / manifest.name(step))
    newest = folder / manifest.name(STEPS - 1)
    weight = torch.load(newest / "checkpoint.pt")["state_dict"]["model.model.norm.weight"]
    content = (newest / "checkpoint.pt").read_bytes()
    place = content.find(weight.numpy().tobytes()) + 2
    (newest / "checkpoint.pt").write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    flags = [f"--last_checkpoint.dirpath={folder}"]
    record = train.run("ddp", f"passes-{guarded}", *flags, prelude=None if guarded else unverified).check()
    if guarded:
        assert f"{newest.name} (its checkpoint.pt is not what was written" in record.log(0)
        assert list(record.loss) == [STEPS - 1, STEPS]
        assert_same(folder / manifest.name(STEPS), whole / manifest.name(STEPS))
    else:
        assert list(record.loss) == [STEPS]
        ends = [read_full(path / manifest.name(STEPS))["state_dict"] for path in (folder, whole)]
        assert not _equal(*ends)


# ---- a full disk ---------------------------------------------------------------------------------------------------


class Ballast(Callback):
    """Fill the disk after step 1 but for what a small file takes; free it after step 3.

    Args:
        folder: On that disk.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "ballast"

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.strategy.barrier()
        if trainer.is_global_zero and trainer.global_step == 1:
            free = shutil.disk_usage(self.file.parent).free
            self.file.write_bytes(bytes(max(0, free - 40_000)))
        if trainer.is_global_zero and trainer.global_step == 3:
            self.file.unlink()
        trainer.strategy.barrier()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB, where this machine lets us mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", "size=16m", "none", str(folder)]
    if not mount or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def refuse_rank_1() -> None:
    """In each worker: rank 1's files cannot grow beyond 20 kB, as where its node's disk alone is full."""
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def untold() -> None:
    """In each worker: what the disk refuses is not gathered."""
    code: Any = commit
    code.disk_trouble = lambda write: write()


@pytest.mark.parametrize("choice", ["continue", "stop"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_on_a_full_disk_training_goes_on_or_stops_and_the_older_checkpoint_stands(
    train: Trainings, small_disk: Path, strategy: str, choice: str
) -> None:
    flags = [f"--last_checkpoint.dirpath={small_disk}", f"--last_checkpoint.on_failed_save={choice}"]
    flags += ["--trainer.max_steps=5", "--model.optim.schedule=constant"]
    record = train.run(strategy, f"full-{strategy}-{choice}", *flags, callbacks=[Ballast(small_disk)])
    log = record.log(0)
    assert "step00000002.ckpt was not saved, rank " in log and "GiB are free" in log
    assert "the newest valid checkpoint is" in log
    first, left = small_disk / manifest.name(1), sorted(path.name for path in small_disk.glob("*ckpt*"))
    if choice == "continue":
        record.check()
        assert log.count("; training goes on\n") == 2, "after steps 2 and 3"
        assert left == [manifest.name(4), manifest.name(5)]
    else:
        assert all(answer.startswith("Ended: step00000002.ckpt was not saved") for answer in record.answers.values())
        assert left == [first.name] and commit.verify(first) is None


@pytest.mark.parametrize("strategy", ["fsdp2", "zero1", "zero3"])
def test_what_one_rank_cannot_write_ends_on_all_ranks_alike(train: Trainings, strategy: str) -> None:
    """DeepSpeed's save has barriers after the writing, at which the others would wait for ever."""
    record = train.run(strategy, f"refused-{strategy}", "--trainer.max_steps=2", prelude=refuse_rank_1)
    assert not list((record.run / "checkpoints").iterdir())
    assert record.log(0).count("step00000001.ckpt was not saved, rank 1: ") == 1
    for answer in record.answers.values():  # at the last step training does not go on
        assert answer.startswith("Ended: step00000002.ckpt was not saved, rank 1: "), record.answers


def test_without_the_guard_a_full_disk_ends_training(train: Trainings, small_disk: Path) -> None:
    flags = [f"--last_checkpoint.dirpath={small_disk}", "--trainer.max_steps=5"]
    record = train.run("ddp", "full-untold", *flags, callbacks=[Ballast(small_disk)], prelude=untold)
    assert not record.ok and "was not saved" not in record.error
