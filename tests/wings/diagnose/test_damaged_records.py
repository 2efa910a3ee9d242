"""A damaged file is read around, or refused in one sentence that names it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dist_template import InputError
from dist_template.wings.diagnose import expected, read_run
from dist_template.wings.launch import command as launch
from dist_template.wings.setup.upgrade import read_record
from tests.support.library import run_lock
from tests.support.wings import Registry, tables

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
numbers = st.one_of(st.integers(), st.floats(), st.just(10**400))
simple = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=9))


def nested(inner: Any) -> Any:
    keyed = st.dictionaries(st.text(max_size=5), inner, max_size=2)
    return st.one_of(st.lists(inner, max_size=2), keyed)


values = st.recursive(simple, nested, max_leaves=3)
DAMAGES = [b"", b"\xff\xfe\0", b"[" * 20_000, b'{"a": ' * 20_000, b"{]", b"9" * 5_000]
DAMAGES += [b"a: b: c", b"!!int x", b"\t- x\n"]


def damaged(record: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Other bytes, another value for the object or for one in it, or a half of the file."""
    keys, text = st.sampled_from(sorted(record)), json.dumps(record).encode()
    changed = st.builds(lambda key, value: record | {key: value}, keys, values)
    without = keys.map(lambda key: {name: record[name] for name in record if name != key})
    objects = st.one_of(values, changed, without).map(lambda each: json.dumps(each).encode())
    halves = st.integers(0, len(text)).map(lambda end: text[:end])
    return st.one_of(st.sampled_from(DAMAGES), objects, halves)


def read_all(folder: Path) -> None:
    history = read_run(folder)
    expected.progress(history)
    for histories in ([history], [history] * 2):
        tables(histories, [""] * len(histories))


READERS: list[Callable[[Path], Any]] = [read_all, read_record]
READERS += [
    lambda folder: launch._read(folder / "launch"),
    lambda folder: Registry(folder).roll_back(),
]


@pytest.mark.parametrize("name", GOOD)
def test_a_damaged_file_gives_no_traceback(name: str, tmp_path: Path) -> None:
    for file, record in GOOD.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(json.dumps(record))
    (tmp_path / "latest").symlink_to("v1")

    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[*HealthCheck],
        phases=[Phase.generate],
    )
    @given(damaged(GOOD[name]))
    def drawn(content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        for read in READERS:
            try:
                read(tmp_path)
            except InputError as error:
                assert len(str(error)) < 1_000 and "\n" not in str(error), error
        run_lock.refusal(
            tmp_path / name, run_lock.read(tmp_path / "lock.json") or {}, run_lock.this_process()
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_lock, "LEASE_S", 0.0)
        drawn()


def test_what_is_left_of_a_damaged_file_is_read(tmp_path: Path) -> None:
    good = json.dumps(GOOD["metrics.jsonl"])
    bad = ["[]", '{"step": "x", "time": 1}', '{"step": NaN, "time": 1}', "5"]
    lines = [good, *bad, good.replace('"step": 1', '"step": 2')]
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    loss = read_run(tmp_path).metrics["train/loss"]
    assert loss.steps.tolist() == [1, 2] and math.isclose(loss.values[0], 2.5)
