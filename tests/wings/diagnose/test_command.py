"""The verb: which run it takes, what it prints, how it ends, and that it starts at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dist_template.wings.diagnose import History
from tests.support.histories import a_run
from tests.support.runs import PROJECT, main


def write(history: History, folder: Path) -> Path:
    """As a run does."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(history.config))
    (folder / "facts.json").write_text(json.dumps(history.facts))
    metrics = [(name, history.metrics[name]) for name in history.metrics.names]
    lines = [
        json.dumps({"step": step, "time": at, name: value})
        for name, series in metrics
        for step, at, value in zip(
            *(c.tolist() for c in (series.steps, series.times, series.values)), strict=True
        )
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return write(
        a_run(400, 5, config={"trainer.precision": "32-true"}),
        tmp_path / "runs" / "pretrain" / "slow",
    )


def test_it_says_what_is_wrong_and_what_to_type(
    slow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(slow)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{slow}: step 400 of 400: 1 warning\n\nWARNING  training runs in fp32")
    assert "--trainer.precision bf16-mixed" in out and "now 32-true" in out


def test_without_a_fault_it_says_what_was_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(a_run(400, 5), tmp_path / "run")
    assert main(["diagnose", str(run)]) == 0
    assert "nothing found: checked " in capsys.readouterr().out
    (run / "facts.json").unlink()
    assert main(["diagnose", str(run)]) == 0
    assert "facts.json missing" in capsys.readouterr().out


def test_json_is_for_programs(slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(slow), str(slow), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == second and first["run"] == str(slow) and first["step"] == 400
    (finding,) = first["findings"]
    assert finding["rule"] == "fp32_on_gpu" and finding["level"] == "warning"
    assert finding["causes"][0]["changes"][0]["flag"] == "--trainer.precision bf16-mixed"


def test_without_a_folder_it_takes_the_newest_under_runs(
    slow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = write(a_run(400, 5), tmp_path / "runs" / "other" / "newer")
    for run, at in ((slow, 2e9), (newer, 2.1e9)):
        for path in run.iterdir():
            os.utime(path, (at, at))
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose"]) == 0
    assert "runs/other/newer" in capsys.readouterr().out
    assert main(["diagnose", "runs/pretrain"]) == 0
    assert "runs/pretrain/slow" in capsys.readouterr().out


def test_a_folder_without_runs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(tmp_path)]) == 2
    assert f"error: {tmp_path} is not a run folder" in capsys.readouterr().err


def test_a_folder_without_a_configuration_is_not_a_run(
    slow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = write(a_run(400, 5), tmp_path / "runs" / "other" / "newer")
    (newer / "config.yaml").unlink()
    os.utime(newer / "metrics.jsonl", (4e9, 4e9))
    assert main(["diagnose", str(tmp_path / "runs")]) == 0
    assert str(slow) in capsys.readouterr().out
    assert main(["diagnose", str(newer)]) == 2
    assert f"error: {newer} has no config.yaml" in capsys.readouterr().err


def test_it_imports_neither_torch_nor_lightning(slow: Path) -> None:
    code = (
        f"import sys; from tests.support.line import main; main(['diagnose', {str(slow)!r}]);"
        "sys.exit(bool({'torch', 'lightning', 'transformers'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
