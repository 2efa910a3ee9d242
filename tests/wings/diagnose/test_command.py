"""The verb: which run it takes, what it prints, how it ends, and that it starts at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_template.wings.diagnose import History
from tests.support.histories import a_run
from tests.support.runs import main


def write(history: History, folder: Path) -> Path:
    """As a run does."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(history.config))
    (folder / "facts.json").write_text(json.dumps(history.facts))
    lines = []
    for name in history.metrics.names:
        series = history.metrics[name]
        columns = (each.tolist() for each in (series.steps, series.times, series.values))
        for step, at, value in zip(*columns, strict=True):
            lines.append(json.dumps({"step": step, "time": at, name: value}))
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    history = a_run(400, 5, config={"trainer.precision": "32-true"})
    return write(history, tmp_path / "runs" / "pretrain" / "slow")


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


def test_it_takes_the_newest_run_and_says_what_it_has_not(
    slow: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    newer = write(a_run(400, 5), tmp_path / "runs" / "other" / "newer")
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
