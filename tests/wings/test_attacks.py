"""Runs, checkpoints and stores of a stranger: nothing outside is written, nothing hangs or runs.

Each attack of tests/support/attacks.py changes a copy of a sound run, with which each of its verbs
ends in 0, or in a sentence."""

import contextlib
import json
import os
import random
import shutil
import signal
from collections.abc import Generator, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import yaml
from fsspec.implementations.memory import MemoryFileSystem

from dist_template.cluster import run_lock
from dist_template.wings.store import hooks, lock
from tests.support.attacks import (
    ATTACKS,
    ESCAPE,
    LOAD,
    ODD_VALUES,
    READ,
    STORE,
    STORE_ATTACKS,
    TRAIN,
)
from tests.support.runs import OF_ANOTHER_RUN, SMALL_LLAMA, command, only_run, run, small

LIMIT_S = 60  # of a verb; the slowest takes 5 s
DAILY = {
    *"""absolute name|name below a link|store of a stranger|/dev/zero in a checkpoint|key with //
    |markers of folders|manifest of a proxy""".replace("\n    ", "").split("|")
}


@pytest.fixture(scope="module")
def sound(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint."""
    folder = tmp_path_factory.mktemp("sound")
    flags = small(corpus, cache, folder)
    steps = ["--trainer.max_steps=2", "--trainer.val_check_interval=2"]
    assert run("fit", *flags, *steps) == 0
    return only_run(folder)


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home, in which verbs start, with a file."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_text("the user's\n")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(folder)
    for name in ("BEAT_S", "LEASE_S", "SETTLE_S"):
        monkeypatch.setattr(lock, name, 0.02)
        monkeypatch.setattr(run_lock, name, 0.02)
    monkeypatch.setattr(hooks, "DOWN_S", 0.1)
    hooks.OWN.clear()
    return folder


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


class Hangs(BaseException):
    """No Exception, which a verb might report, nor a TimeoutError, which is an OSError."""


@contextlib.contextmanager
def limited() -> Generator[None]:
    """Ends a verb that hangs, again and again if it handles that."""

    def expire(*_: object) -> None:
        raise Hangs(f"it takes longer than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def argv_of(verb: str, given: Path, other: Path, flags: list[str], output: Path) -> list[str]:
    """The command of an attack's verb for the folder of the given run."""
    more = ["--trainer.max_steps=3", f"--run.root={given.parents[1]}", "--store.every_s=0"]
    of_run = [*flags, *more, f"--run.name={given.parent.name}"]
    return {
        "diagnose": ["diagnose", str(given)],
        "report": ["report", str(given)],
        "compare": ["compare", str(given), str(other), f"--output={output / 'compared'}"],
        "export": ["export", str(given), f"--output={output / 'exported'}"],
        "validate": ["validate", *flags, f"--ckpt_path={given / 'checkpoints'}"],
        "resume": ["fit", *of_run],
        "status": ["launch", "status", str(given)],
        "stop": ["launch", "stop", str(given)],
        "logs": ["launch", "logs", str(given)],
    }[verb]


def attacked(argv: list[str], outside: Path, capfd: Any) -> str:
    """Runs a verb; returns what it printed. Nothing in `outside` changes, it ends, with 0, in a
    sentence, or to be started again, and it steers no terminal."""
    before = content(outside)
    capfd.readouterr()
    with limited():
        try:
            code: Any = command(argv)
        except SystemExit as stopped:
            code = stopped.code
    printed = "".join(capfd.readouterr())
    assert code in (0, 2, 75), f"{argv[0]}: exit code {code}: {printed}"
    assert content(outside) == before, f"{argv[0]} writes outside: {printed}"
    assert "Traceback" not in printed and "hangs" not in printed, printed
    codes = [letter for letter in printed if letter in ESCAPE and not letter.isprintable()]
    assert not codes, f"{argv[0]}: {printed!r}"
    assert code == 0 or len(printed.strip()) > 20, f"{argv[0]} says nothing"
    return printed


def tiers(table: dict[str, Any]) -> list[Any]:
    marks = (pytest.mark.slow, pytest.mark.nightly)
    return [name if name in DAILY else pytest.param(name, marks=marks) for name in table]


@pytest.mark.slow
@pytest.mark.parametrize("name", tiers(ATTACKS))
def test_a_given_run_harms_nothing(
    name: str, sound: Path, outside: Path, corpus: Path, cache: Path, tmp_path: Path, capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    attack = ATTACKS[name]
    for verb in attack.verbs:
        for variable in OF_ANOTHER_RUN:
            monkeypatch.delenv(variable, raising=False)
        given = tmp_path / verb / "attacked" / "default" / "given"
        shutil.copytree(sound, given)
        attack.change(given, outside)
        fill_for(given)
        if verb == "resume":
            monkeypatch.setenv("DIST_RUN_ID", "given")
        flags = small(corpus, cache, tmp_path / verb)
        attacked(argv_of(verb, given, sound, flags, tmp_path / verb), outside, capfd)
        beside = {path.name for path in (tmp_path / verb).rglob("*") if ".part" in path.name}
        assert not beside and not list((tmp_path / verb / "attacked").glob("plotly*"))


DAMAGED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


def fill_for(given: Path) -> None:
    """Puts the empty files that an attack's manifests list into the store that they name."""
    for file in (given / "checkpoints").glob("*/manifest.json"):
        with contextlib.suppress(*DAMAGED):
            files = json.loads(file.read_text() if file.is_file() and file.stat().st_size else "{}")
            names = [name for name, (size, _) in files["files"].items() if not size]
            fill(STORE, {f"{file.parent.name}/{name}": b"" for name in names})


def fill(address: str, files: dict[str, bytes]) -> None:
    """Writes objects, also those with names that no file system has."""
    memory = fsspec.filesystem("memory")
    for name, data in files.items():
        memory.pipe_file("/scratch", data)
        key = f"/{address.partition('://')[2]}/{name}"
        MemoryFileSystem.store[key] = MemoryFileSystem.store.pop("/scratch")


@pytest.mark.slow
@pytest.mark.parametrize("name", tiers(STORE_ATTACKS))
def test_a_given_store_harms_nothing(
    name: str, sound: Path, outside: Path, corpus: Path, cache: Path, tmp_path: Path, capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    attack = STORE_ATTACKS[name]
    for verb in attack.verbs:
        for variable in OF_ANOTHER_RUN:
            monkeypatch.delenv(variable, raising=False)
        MemoryFileSystem.store.clear()
        files = {
            path.relative_to(sound).as_posix(): path.read_bytes()
            for path in sound.rglob("*")
            if path.is_file()
        }
        attack.change(files, outside)
        fill(STORE, files)
        if verb == "continue":
            monkeypatch.setenv("DIST_RUN_ID", "one")
            flags = small(corpus, cache, tmp_path / verb)
            argv = ["fit", *flags, "--trainer.max_steps=3", "--run.store=memory://bucket"]
        else:
            argv = [verb, STORE]
            argv += [f"--output={tmp_path / 'exported'}"] if verb == "export" else []
        attacked(argv, outside, capfd)
        shutil.rmtree(tmp_path / "exported", ignore_errors=True)
        copied = [tmp_path / "cache", tmp_path / "continue"]
        for path in (path for folder in copied for path in folder.rglob("*") if path.is_file()):
            assert b"Please log in" not in path.read_bytes(), f"{verb}: a proxy's page is kept"
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_sound_run_passes_every_verb(
    sound: Path, outside: Path, corpus: Path, cache: Path, tmp_path: Path, capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Else an attack might be refused because of something else."""
    for verb in (*READ, *LOAD, *TRAIN):
        for variable in OF_ANOTHER_RUN:
            monkeypatch.delenv(variable, raising=False)
        given = tmp_path / verb / "attacked" / "default" / "given"
        shutil.copytree(sound, given)
        if verb == "resume":
            monkeypatch.setenv("DIST_RUN_ID", "given")
        argv = argv_of(verb, given, sound, small(corpus, cache, tmp_path / verb), tmp_path / verb)
        assert "error" not in attacked(argv, outside, capfd).lower().replace("0 errors", "")


SMALL_FILES = "config.yaml facts.json environment.json metrics.jsonl incidents.jsonl goodput.jsonl"
SEEDS = int(os.environ.get("SEEDS", "100"))


@pytest.mark.slow
@pytest.mark.nightly
def test_any_value_of_any_file_may_have_any_type(
    sound: Path, outside: Path, tmp_path: Path, capfd: Any
) -> None:
    """`SEEDS=1000 …` for more: in each, some values of one file are replaced."""
    for seed in range(SEEDS):
        chance, given = random.Random(seed), tmp_path / "attacked" / "default" / f"{seed}"
        shutil.copytree(sound, given, ignore=shutil.ignore_patterns("checkpoints"))
        file = given / chance.choice(SMALL_FILES.split())
        records = [yaml.safe_load(line) for line in read_documents(file)]
        for record in records:
            for _ in range(chance.randint(0, 3)):
                replace_one(record, chance)
        file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        for argv in (["diagnose", str(given)], ["report", str(given)]):
            attacked(argv, outside, capfd)
        shutil.rmtree(given)


def read_documents(file: Path) -> list[str]:
    text = file.read_text() if file.exists() else "{}"
    return text.splitlines() if file.suffix == ".jsonl" else [text]


def replace_one(tree: Any, chance: random.Random) -> None:
    """Replaces a value somewhere in a tree."""
    while isinstance(tree, dict | list) and tree:
        key = chance.choice([*tree] if isinstance(tree, dict) else [*range(len(tree))])
        if not isinstance(tree[key], dict | list) or not tree[key] or chance.random() < 0.2:
            tree[key] = deepcopy(chance.choice(ODD_VALUES))
            return
        tree = tree[key]


class Touches:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {os.environ['HOME']}/x",)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["code", "pickle"])
def test_code_in_a_models_folder_does_not_run(
    kind: str, outside: Path, flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    """As a stranger's repository on the Hugging Face hub: with code of its own, or a pickle."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = yaml.safe_load(SMALL_LLAMA) | {"vocab_size": 300}
    if kind == "code":
        (folder / "code.py").write_text(f"open({str(outside / 'x')!r}, 'w')\n")
        names = {name: f"code.{name}" for name in ("AutoConfig", "AutoModelForCausalLM")}
        config |= {"model_type": "odd", "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({"model.embed_tokens.weight": Touches()}, folder / "pytorch_model.bin")
    for argv in (
        ["fit", *flags, f"--model.pretrained={folder}"],
        ["serve", str(folder), "--port=0"],
    ):
        said = attacked(argv, outside, capfd)
        assert "cannot be loaded" in said, "else it is refused because of something else"


def test_there_are_enough_attacks() -> None:
    assert len(ATTACKS) + len(STORE_ATTACKS) >= 40 and DAILY <= {*ATTACKS, *STORE_ATTACKS}
