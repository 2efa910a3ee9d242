"""Old names of keys and values: accepted for a release with one warning, then refused; `migrate` rewrites the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dist_template import deprecations
from dist_template.cli import config_file
from dist_template.deprecations import DEPRECATIONS, Deprecation
from dist_template.errors import InputError
from dist_template.observe.history.run import read_run
from dist_template.records import flatten
from dist_template.tools.migrate import migrated
from tests.support.line import PACKAGE
from tests.support.runs import FIT_CONFIGS, only_run, run

TABLE = (
    Deprecation("run.label", since="0.2.0", removed="0.3.0", new="run.name"),
    Deprecation("trainer.strategy.tensor_size", since="0.2.0", removed="0.3.0", new="trainer.strategy.tp_size"),
    Deprecation("trainer.strategy.class_path", since="0.2.0", removed="0.3.0", values={"Sharded": "MeshStrategy"}),
    Deprecation("model.optim.schedule", since="0.1.0", removed="0.2.0", values={"cos": "cosine"}),
)
OLD = """\
# What I try   (a comment at the top)
run: {label:  'mine',  root: elsewhere}   # one line

trainer:
    strategy:   # of four spaces
        class_path: Sharded
        # about the next key
        init_args:
            "tensor_size":  2     # é, and a tail
    max_steps: 0x10
model: {optim: {schedule: cosine, learning_rate: 1.0e-3}}
"""


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecations, "DEPRECATIONS", TABLE)
    monkeypatch.setattr(deprecations, "version", lambda _: "0.2.1")
    monkeypatch.setattr(deprecations, "_reported", set())


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_migrate_changes_the_old_names_alone(tmp_path: Path, end: str, capsys: pytest.CaptureFixture) -> None:
    path, new = tmp_path / "configs" / "mine.yaml", tmp_path / "configs" / "new.yml"
    path.parent.mkdir()
    path.write_bytes(OLD.replace("\n", end).encode())
    new.write_text("trainer: {max_steps: 3}\n")
    assert run("migrate", str(tmp_path / "configs")) == 0
    expected = OLD.replace("label", "name").replace('"tensor_size"', "tp_size").replace("Sharded", "MeshStrategy")
    assert path.read_bytes().decode() == expected.replace("\n", end)
    assert new.read_text() == "trainer: {max_steps: 3}\n"
    out = capsys.readouterr().out
    assert f"{path}: run.label is run.name\n" in out and "1 of 2 files had names of earlier versions" in out
    assert run("migrate", str(path), str(new)) == 0 and "0 of 2 files" in capsys.readouterr().out


def test_an_old_name_is_read_as_the_new_one_with_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(OLD)
    found = flatten(config_file.read(str(path)))
    assert found["trainer.strategy"] == "MeshStrategy" and found["trainer.strategy.tp_size"] == 2
    assert found["run.name"] == "mine"
    config_file.read(str(path))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0] == (
        f"warning: --config {path}: run.label is run.name since version 0.2.0; version 0.3.0 refuses the old name: "
        f"`python -m {PACKAGE} migrate {path}` rewrites it"
    )
    path.rename(tmp_path / "config.yaml")
    history = read_run(tmp_path)
    assert history.key("run.name") == "mine" and not capsys.readouterr().err, "a run's record is only read"


def test_an_old_name_trains_in_a_file_and_as_a_flag(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("run: {label: of_a_file}\n")
    short = ["--trainer.max_steps=1", "--model.optim.warmup=0"]
    assert run("fit", *flags, *short, "--config", str(path)) == 0
    assert only_run(tmp_path, "of_a_file").is_dir()
    assert run("fit", *flags, *short, "--run.label", "of_a_flag") == 0
    assert only_run(tmp_path, "of_a_flag").is_dir()
    assert "warning: --run.label: run.label is run.name since" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model: {optim: {schedule: cos}}", "and the old name is not accepted any more: `python -m"),
        ("run: {label: a, name: b}", "run.label and run.name, its new name, are both given: remove the first"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, sentence: str, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert run("fit", "--config", str(path)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --config {path}: ") and sentence in error and error.count("\n") == 1


def test_migrate_rewrites_all_files_or_none(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first, broken = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(OLD)
    broken.write_text("run: {label: [\n")
    assert run("migrate", str(tmp_path)) == 2
    assert first.read_text() == OLD and f"error: file {broken} is not YAML" in capsys.readouterr().err
    assert run("migrate", str(tmp_path / "nowhere.yaml")) == 2 and "cannot be read" in capsys.readouterr().err


def test_an_edit_that_would_change_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Deprecation("run.name", since="0.2.0", removed="0.3.0", values={"a": "[b, c]"})
    monkeypatch.setattr(deprecations, "DEPRECATIONS", (broken,))
    path = tmp_path / "mine.yaml"
    path.write_text("run:\n  name: a\n")
    with pytest.raises(InputError, match="would lose more than the old names"):
        migrated(path)
    assert path.read_text() == "run:\n  name: a\n"


def test_the_library_uses_no_old_name_and_keeps_new_ones_in_their_sections() -> None:
    for path in FIT_CONFIGS:
        text = path.read_text()
        assert yaml.safe_load(deprecations.current(text, None)[0]) == yaml.safe_load(text)
    for entry in DEPRECATIONS:
        assert bool(entry.new) != bool(entry.values) and entry.removed > entry.since
        assert not entry.new or entry.new.rpartition(".")[0] == entry.key.rpartition(".")[0], entry
