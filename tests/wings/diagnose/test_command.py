"""The verb: which run it takes, what it prints, how it ends, and that it starts at once."""

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_template import InputError
from dist_template.wings.diagnose import callback as diagnosis
from dist_template.wings.diagnose import expected, read_run
from dist_template.wings.launch import command as launch
from dist_template.wings.setup.upgrade import read_record
from tests.support.library import read_lines, run_lock
from tests.support.runs import logged, main, only_run, run
from tests.support.wings import Registry, tables
from tests.support.written import falling, write_run

CONFIG = {"trainer": {"precision": "32-true", "max_steps": 400}}
FACTS = {"machine": {"device": "NVIDIA H200", "supports_bf16": True}}


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "pretrain" / "slow"
    return write_run(folder, falling(400), CONFIG, facts=FACTS)


def test_it_says_what_is_wrong_and_what_to_type(slow: Path, capsys: Any) -> None:
    assert main(["diagnose", str(slow)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{slow}: step 400 of 400: 1 warning\n\nWARNING  training runs in fp32")
    assert "--trainer.precision bf16-mixed" in out and "now 32-true" in out
    assert main(["diagnose", str(slow), str(slow), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == second and first["run"] == str(slow) and first["step"] == 400
    (finding,) = first["findings"]
    assert finding["causes"][0]["changes"][0]["flag"] == "--trainer.precision bf16-mixed"


def test_it_takes_the_newest_run(slow: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    newer = write_run(tmp_path / "runs" / "other" / "newer", falling(400), facts={"machine": {}})
    for path in newer.iterdir():
        os.utime(path, (4e9, 4e9))
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose"]) == 0
    printed = capsys.readouterr().out
    assert "runs/other/newer" in printed and "nothing found: checked " in printed
    (newer / "facts.json").unlink()
    assert main(["diagnose", str(newer)]) == 0 and "facts.json missing" in capsys.readouterr().out
    (newer / "config.yaml").unlink()
    assert main(["diagnose", "runs"]) == 0 and "pretrain/slow" in capsys.readouterr().out
    assert main(["diagnose", str(newer)]) == 2 and "has no config.yaml" in capsys.readouterr().err
    assert main(["diagnose", str(newer.parent)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


LOW = """--model.optim.learning_rate=1e-7 --trainer.limit_val_batches=0 --diagnosis.every_s=0
    --trainer.max_steps=60""".split()


@pytest.mark.slow
def test_a_finding_is_shown_once(flags: Any, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    refresh, calls = diagnosis.History.refresh, list[Any]()

    def stutter(history: Any) -> None:
        calls.append(history)
        if len(calls) == 2:  # the first reads what earlier attempts wrote
            raise OSError("Stale file handle")
        refresh(history)

    monkeypatch.setattr(diagnosis.History, "refresh", stutter)
    assert run("fit", *flags, *LOW) == 0
    out, folder = capsys.readouterr().out, only_run(tmp_path)
    assert "Stale file handle; training continues" in out
    assert out.count("diagnosis: error: the loss does not decrease") == 1
    assert f"diagnose {folder}" in out
    lines = read_lines(folder / diagnosis.FILE)
    (found,) = (line for line in lines if line["rule"] == "loss_not_decreasing")
    assert found["step"] < 60
    assert found["causes"][0]["changes"][0]["key"] == "model.optim.learning_rate"
    errors = logged(folder, "health/errors")
    assert errors[2] == 0 and errors[60] == 1


GOOD: dict[str, dict[str, Any]] = {
    "config.yaml": {"trainer": {"max_steps": 9}, "model": {"optim": {"warmup": 1}}},
    "defaults.yaml": {"trainer": {"max_steps": -1}},
    "facts.json": {"training": {"max_steps": 9}, "parameters": {"active": 5}},
    "environment.json": {"packages": {"torch": "2"}},
    "metrics.jsonl": {"step": 1, "time": 5.0, "train/loss": 2.5},
    "goodput.jsonl": {"attempt": 1.0, "time": 2.0, "from_step": 0, "step": 4, "productive": 1.0},
    "incidents.jsonl": {"step": 3, "kind": "spike", "action": "skip"},
    "crash/rank0.json": {"time": 3.0, "step": 2, "kind": "error", "message": "x"},
    "launch/launch.json": {"on": "slurm", "id": "5", "hosts": [], "ssh": ""},
    "lock.json": {"host": "a", "machine": "b", "pid": 1, "since": 2.0, "parent": 3, "launch": ""},
    ".cruft.json": {"template": "x", "commit": "y", "context": {"cookiecutter": {"a": "b"}}},
}
VALUES: list[Any] = [None, True, -1, 0.5, math.nan, 10**400, "x", [], [1], {}, {"a": {"b": 1}}]
DAMAGES = [b"\xff\xfe\0", b"[" * 20_000, b'{"a": ' * 20_000, b"{]", b"9" * 5_000]
DAMAGES += [b"a: b: c", b"!!int x", b"\t- x\n"]


def damaged(record: dict[str, Any]) -> Iterator[bytes]:
    """Other bytes, another value for the object or for one in it, or a part of the file."""
    text = json.dumps(record).encode()
    yield from DAMAGES
    yield from (text[:end] for end in range(0, len(text), 8))
    changed = [*VALUES, *({key: record[key]} for key in record)]
    changed += [record | {key: value} for key in record for value in VALUES]
    yield from (json.dumps(each).encode() for each in changed)


def read_all(folder: Path) -> None:
    history = read_run(folder)
    expected.progress(history)
    for histories in ([history], [history] * 2):
        tables(histories, [""] * len(histories))


def read_lock(folder: Path) -> None:
    holder = run_lock.read(folder / "lock.json") or {}
    run_lock.refusal(folder / "lock.json", holder, run_lock.this_process())


READERS: list[Callable[[Path], Any]] = [read_all, read_record, read_lock]
READERS.append(lambda folder: launch._read(folder / "launch"))
READERS.append(lambda folder: Registry(folder).roll_back())


@pytest.mark.parametrize("name", GOOD)
def test_a_damaged_file_gives_no_traceback(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    for file, record in GOOD.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(json.dumps(record))
    (tmp_path / "latest").symlink_to("v1")
    monkeypatch.setattr(run_lock, "LEASE_S", 0.0)
    for content in damaged(GOOD[name]):
        (tmp_path / name).write_bytes(content)
        for read in READERS:
            try:
                read(tmp_path)
            except InputError as error:
                assert len(str(error)) < 1_000 and "\n" not in str(error), error


def test_what_is_left_of_a_damaged_file_is_read(tmp_path: Path) -> None:
    good = json.dumps(GOOD["metrics.jsonl"])
    bad = ["[]", '{"step": "x", "time": 1}', '{"step": NaN, "time": 1}', "5"]
    lines = [good, *bad, good.replace('"step": 1', '"step": 2')]
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    loss = read_run(tmp_path).metrics["train/loss"]
    assert loss.steps.tolist() == [1, 2] and math.isclose(loss.values[0], 2.5)
