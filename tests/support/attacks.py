"""Runs and stores that a stranger gives: each attack changes a copy of a sound run or its store.

ATTACKS has for each its verbs and what it does to the copy. `outside` is a folder of the user, in
which nothing may change; a program of an attack would write there too."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from fsspec.implementations.memory import MemoryFileSystem

from dist_template.checkpoint import manifest

Files = dict[str, Any]
ESCAPE = "\x1b]0;owned\a\x1b[2J\x9b31m"
READ = ("diagnose", "report", "compare")
LOAD = ("export", "validate")
TRAIN = ("resume",)
LAUNCH = ("status", "stop", "logs")
STORE = "memory://bucket/default/one"  # the address of the copied run


class Attack(NamedTuple):
    verbs: tuple[str, ...]
    change: Callable[[Path, Path], object]  # of the copied run; with the folder `outside`


class StoreAttack(NamedTuple):
    verbs: tuple[str, ...]
    change: Callable[[Files, Path], object]  # of the objects by their names in the run


# ---- what attacks do -------------------------------------------------------------------------


def write(name: str, content: str | bytes) -> Callable[[Path, Path], object]:
    def change(run: Path, outside: Path) -> None:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        text = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        path.write_bytes(text.replace(b"{outside}", os.fsencode(outside)))

    return change


def lines(name: str, *records: object) -> Callable[[Path, Path], object]:
    return write(name, "".join(f"{json.dumps(record)}\n" for record in records))


def fifo(name: str) -> Callable[[Path, Path], object]:
    def change(run: Path, outside: Path) -> None:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path)

    return change


def huge(name: str) -> Callable[[Path, Path], object]:
    """A sparse file, which takes no space and hours to read."""

    def change(run: Path, outside: Path) -> None:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.touch()
        os.truncate(path, 2**40)

    return change


def link(name: str, target: str = "{outside}/file") -> Callable[[Path, Path], object]:
    def change(run: Path, outside: Path) -> None:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            path.unlink()
        path.symlink_to(target.replace("{outside}", str(outside)))

    return change


def folder(name: str) -> Callable[[Path, Path], object]:
    def change(run: Path, outside: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir(parents=True)

    return change


def checkpoint_of(run: Path) -> Path:
    return next(path for path in manifest.found(run / "checkpoints"))


def in_checkpoint(change: Callable[[Path, Path], object]) -> Callable[[Path, Path], object]:
    return lambda run, outside: change(checkpoint_of(run), outside)


def entries(**given: Any) -> Callable[[Path, Path], object]:
    """A valid manifest with other entries; files that are lists of names are added, and empty."""

    def change(run: Path, outside: Path) -> None:
        for path in manifest.found(run / "checkpoints"):
            found = json.loads((path / "manifest.json").read_text())
            for key, value in given.items():
                if key == "files" and isinstance(value, list):
                    names = [each.replace("{outside}", str(outside)) for each in value]
                    value = found["files"] | {name: [0, 0] for name in names}
                if isinstance(value, str):
                    value = value.replace("{outside}", str(outside))
                found[key] = value
            (path / "manifest.json").write_text(manifest.rendered(found))

    return change


def config(**given: Any) -> Callable[[Path, Path], object]:
    """The run's config.yaml with other values, by dotted keys with __ in place of a dot."""

    def change(run: Path, outside: Path) -> None:
        keys = yaml.safe_load((run / "config.yaml").read_text())
        for name, value in given.items():
            section, _, key = name.partition("__")
            if key:
                keys[section][key] = value
            else:
                keys[section] = value
        (run / "config.yaml").write_text(yaml.safe_dump(keys))

    return change


def both(*changes: Callable[[Path, Path], object]) -> Callable[[Path, Path], object]:
    return lambda run, outside: [change(run, outside) for change in changes]


def launched(**record: Any) -> Callable[[Path, Path], object]:
    known = {"on": "ssh", "id": "", "hosts": [], "ssh": "ssh"} | record
    return write("launch/launch.json", json.dumps(known))


LAUGHS = "a0: &a0 {x: 1, y: 1}\n" + "".join(
    f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 40)
)
ODD_VALUES: list[Any] = [None, [], {}, "text", True, -1, 1e308, [[1]], {"a": [1]}, ESCAPE]
CRASH: dict[str, Any] = {
    "time": 1.0, "attempt": "", "rank": 0, "host": ESCAPE, "kind": "other", "place": ESCAPE,
    "module": ESCAPE, "error": ESCAPE, "message": ESCAPE, "own_lines": [ESCAPE], "step": 1,
    "first_step": 0, "phase": "", "memory": {},
}  # fmt: skip
TOUCH = "touch {outside}/x"

ATTACKS: dict[str, Attack] = {
    # names of files in a manifest, which are fetched from the store that it names
    "absolute name": Attack(LOAD, entries(files=["{outside}/x"], checkpoint_store=STORE)),
    "name that climbs": Attack(LOAD, entries(files=["../../../x"], checkpoint_store=STORE)),
    "name with a NUL": Attack(LOAD, entries(files=["a\0b"], checkpoint_store=STORE)),
    "name with a backslash": Attack(LOAD, entries(files=["..\\x"], checkpoint_store=STORE)),
    "name of 300 bytes": Attack(LOAD, entries(files=["x" * 300], checkpoint_store=STORE)),
    "empty name": Attack(LOAD, entries(files=[""], checkpoint_store=STORE)),
    "name with an empty part": Attack(LOAD, entries(files=["a//b"], checkpoint_store=STORE)),
    "name of a surrogate": Attack(LOAD, entries(files=["\ud800"], checkpoint_store=STORE)),
    "name below a link": Attack(
        LOAD,
        both(
            in_checkpoint(link("below", "{outside}")),
            entries(files=["below/x"], checkpoint_store=STORE),
        ),
    ),
    "store of a stranger": Attack(LOAD, entries(files=["x"], checkpoint_store="file://{outside}")),
    "store with an escape sequence": Attack(
        LOAD, entries(files=["x"], checkpoint_store=f"s3://{ESCAPE}")
    ),
    # files that never end, and others than files
    "FIFO in a checkpoint": Attack(LOAD, both(in_checkpoint(fifo("x")), entries(files=["x"]))),
    "/dev/zero in a checkpoint": Attack(
        LOAD, both(in_checkpoint(link("x", "/dev/zero")), entries(files=["x"]))
    ),
    "FIFO as a manifest": Attack(LOAD, in_checkpoint(fifo("manifest.json"))),
    "/dev/zero as a manifest": Attack(LOAD, in_checkpoint(link("manifest.json", "/dev/zero"))),
    "manifest of a list": Attack(LOAD, in_checkpoint(write("manifest.json", "[]\n"))),
    "manifest of many levels": Attack(LOAD, in_checkpoint(write("manifest.json", "[" * 100_000))),
    "manifest without entries": Attack(LOAD, entries(files=None, time=None)),
    "manifest with a name of codes": Attack(LOAD, entries(files=[ESCAPE])),
    "manifest of HTML": Attack(LOAD, in_checkpoint(write("manifest.json", "<html></html>"))),
    "FIFO as config": Attack((*READ, "export"), fifo("config.yaml")),
    "/dev/zero as config": Attack((*READ, "export"), link("config.yaml", "/dev/zero")),
    "folder as config": Attack((*READ, "export"), folder("config.yaml")),
    "config of a list": Attack((*READ, "export"), write("config.yaml", "- 1\n")),
    "empty config": Attack((*READ, "export"), write("config.yaml", "")),
    "config of 10^12 values": Attack((*READ, "export"), write("config.yaml", LAUGHS)),
    "config that contains itself": Attack((*READ, "export"), write("config.yaml", "a: &a {x: *a}")),
    "config that runs": Attack(
        (*READ, "export"), write("config.yaml", f'!!python/object/apply:os.system ["{TOUCH}"]')
    ),
    "config of odd sections": Attack(
        (*READ, "export"), config(trainer=[1], data="x", run=3, last_checkpoint=[])
    ),
    "config with escape sequences": Attack(
        READ, config(run__name=ESCAPE, model={ESCAPE: ESCAPE}, data__seq_len=ESCAPE)
    ),
    "FIFO as metrics": Attack(READ, fifo("metrics.jsonl")),
    "/dev/zero as metrics": Attack(READ, link("metrics.jsonl", "/dev/zero")),
    "folder as metrics": Attack(READ, folder("metrics.jsonl")),
    "metrics of a tebibyte": Attack(READ, huge("metrics.jsonl")),
    "incidents of a tebibyte": Attack(READ, huge("incidents.jsonl")),
    "empty metrics": Attack(READ, write("metrics.jsonl", "")),
    "metrics of other types": Attack(
        READ,
        lines(
            "metrics.jsonl",
            [],
            3,
            *({"step": 1, "train/loss": odd} for odd in ODD_VALUES),
            {"step": "x"},
            {"step": 2, ESCAPE: 1.0, "\ud800": 2.0, "train/loss": 1e400},
        ),
    ),
    "metrics of a stranger's names": Attack(
        READ, lines("metrics.jsonl", *({"step": n, f"gpu/{ESCAPE}": n} for n in range(99)))
    ),
    **{
        f"{name} of other types": Attack(
            READ,
            lines(name, [], 3, *({"step": odd, "kind": odd, "rank": odd} for odd in ODD_VALUES))
            if name.endswith("jsonl")
            else write(name, json.dumps(odd)),
        )
        for name in ("incidents.jsonl", "goodput.jsonl", "facts.json", "environment.json")
        for odd in ([1],)
    },
    "facts of odd values": Attack(
        READ, write("facts.json", json.dumps({"parameters": [1], "data": 3, "model": ESCAPE}))
    ),
    "FIFO as a crash record": Attack(READ, fifo("crash/rank0.json")),
    "crash record of a list": Attack(READ, write("crash/rank0.json", "[1]")),
    "crash record with codes": Attack(READ, write("crash/rank0.json", json.dumps(CRASH))),
    "crash record of odd values": Attack(
        READ, write("crash/rank0.json", json.dumps(dict.fromkeys(CRASH, [1]) | {"step": 1}))
    ),
    # links out of the run's folder, which verbs would write through
    "metrics are a link": Attack((*READ, *TRAIN), link("metrics.jsonl")),
    "goodput is a link": Attack(TRAIN, link("goodput.jsonl")),
    "evaluation is a link": Attack((*READ, *TRAIN), link("evaluation", "{outside}")),
    "report is a link": Attack(READ, link("report.html")),
    "crash is a link": Attack(TRAIN, link("crash", "{outside}")),
    "root of a stranger": Attack(READ, config(run__root="attacked", run__name="x")),
    # locks and launches
    "lock of a folder": Attack((*TRAIN, "diagnose"), folder("lock.json")),
    "FIFO as a lock": Attack(TRAIN, fifo("lock.json")),
    "lock of a list": Attack(TRAIN, write("lock.json", "[]")),
    "lock of odd values": Attack(
        TRAIN, write("lock.json", json.dumps(dict.fromkeys(("pid", "since", "host"), "x")))
    ),
    "launch of a list": Attack(LAUNCH, write("launch/launch.json", "[]")),
    "launch of nothing": Attack(LAUNCH, write("launch/launch.json", "{}")),
    "FIFO as a launch": Attack(LAUNCH, fifo("launch/launch.json")),
    "launch by a program": Attack(LAUNCH, launched(hosts=["localhost"], ssh=f"{TOUCH} #")),
    "launch on an option": Attack(LAUNCH, launched(hosts=[f"-oProxyCommand={TOUCH}"])),
    "launch on odd hosts": Attack(LAUNCH, launched(hosts=[{"a": 1}, 3])),
    "launch by a stranger's target": Attack(LAUNCH, launched(on="os:system")),
    "launch by a list": Attack(LAUNCH, launched(on=[1])),
    "job that is an option": Attack(LAUNCH, launched(on="slurm", id="--wrap=x")),
    "pid of a text": Attack(
        LAUNCH, both(launched(), write("launch/node-0.pid", f"$({TOUCH})\n; {TOUCH}\n"))
    ),
    "FIFO as a pid": Attack(LAUNCH, both(launched(), fifo("launch/node-0.pid"))),
    "log with codes": Attack(LAUNCH, both(launched(), write("launch/a.log", f"{ESCAPE}\xff"))),
    "log of a tebibyte": Attack(LAUNCH, both(launched(), huge("launch/a.log"))),
    "FIFO as a log": Attack(LAUNCH, both(launched(), fifo("launch/a.log"))),
    "launch is a link": Attack(LAUNCH, link("launch", "{outside}")),
}


def put(name: str, content: bytes = b"x" * 99) -> Callable[[Files, Path], object]:
    def change(files: Files, outside: Path) -> None:
        files[name.replace("{outside}", str(outside))] = content

    return change


def replace(ending: str, content: bytes) -> Callable[[Files, Path], object]:
    return lambda files, outside: files.update(
        {name: content for name in files if name.endswith(ending)}
    )


HTML = b"\n<!DOCTYPE html><html><body>Please log in</body></html>"
FROM_STORE = ("diagnose", "export", "continue")

STORE_ATTACKS: dict[str, StoreAttack] = {
    "key with //": StoreAttack(FROM_STORE, put("/{outside}/x")),
    "key with // below": StoreAttack(FROM_STORE, put("a//b")),
    "key that climbs": StoreAttack(FROM_STORE, put("../../../x")),
    "key with a backslash": StoreAttack(FROM_STORE, put("..\\x")),
    "key with a NUL": StoreAttack(FROM_STORE, put("a\0b")),
    "key with codes": StoreAttack(FROM_STORE, put(f"a{ESCAPE}")),
    "key of 300 bytes": StoreAttack(FROM_STORE, put("x" * 300)),
    "key of a dot": StoreAttack(FROM_STORE, put("./x")),
    "checkpoint that climbs": StoreAttack(
        FROM_STORE, put("../../x/step00000009.ckpt/manifest.json", b"{}")
    ),
    "markers of folders": StoreAttack(FROM_STORE, put("checkpoints/", b"")),
    "markers without a slash": StoreAttack(FROM_STORE, put("checkpoints", b"")),
    "file in place of a folder": StoreAttack(FROM_STORE, put("config.yaml/x")),
    "manifest of a proxy": StoreAttack(FROM_STORE, replace("manifest.json", HTML)),
    "config of a proxy": StoreAttack(FROM_STORE, replace("config.yaml", HTML)),
    "manifest of a list": StoreAttack(FROM_STORE, replace("manifest.json", b"[]")),
    "manifest of nothing": StoreAttack(FROM_STORE, replace("manifest.json", b"")),
    "manifest of bytes": StoreAttack(FROM_STORE, replace("manifest.json", b"\xff\0" * 999)),
    "checkpoint of bytes": StoreAttack(FROM_STORE, replace("checkpoint.pt", b"\xff\0" * 999)),
    "lock of a list": StoreAttack(FROM_STORE, put(".lock", b"[1]")),
    "lock of odd values": StoreAttack(
        FROM_STORE, put(".lock", json.dumps({"host": ESCAPE, "pid": [1], "machine": 3}).encode())
    ),
}  # fmt: skip


def objects() -> Files:
    """The objects of the process's memory by their keys, as bytes."""
    return {key: file.getvalue() for key, file in MemoryFileSystem.store.items()}
