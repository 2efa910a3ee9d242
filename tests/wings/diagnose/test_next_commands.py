"""The commands at the end of a run work as they are printed, and the report has them."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from dist_template import Project
from dist_template.cli import main as command_line
from dist_template.wings.diagnose.next_commands import next_commands
from dist_template.wings.history import History
from tests.support.classifier import PLAIN
from tests.support.line import OURS, PACKAGE
from tests.support.runs import only_run, run

TYPED = ("evaluate", "generate", "export", "continue training")  # serve and TensorBoard wait


def printed(text: str) -> dict[str, str]:
    pattern = r"^(TensorBoard|evaluate|generate|export|serve|continue training) +(\S.*)$"
    return dict(re.findall(pattern, text, re.MULTILINE))


def typed(command: str, project: Project = OURS) -> int:
    python, flag, package, *argv = shlex.split(command)
    assert [python, flag, package] == ["python", "-m", project.package]
    os.environ.pop("DIST_RUN_ID", None)
    return command_line.run(argv, project)


@pytest.mark.slow
def test_the_next_commands_of_a_language_model_work(
    flags: list[str], tmp_path: Path, capsys: Any
) -> None:
    # 20 documents to compare; the last --run.report counts
    more = ["--data.test_share=0.4", "--run.report=true", "--trainer.max_steps=2"]
    assert run("fit", *flags, *more, "--trainer.limit_val_batches=1") == 0
    found = printed(capsys.readouterr().out)
    assert [*found] == ["TensorBoard", *TYPED[:3], "serve", TYPED[3]]
    folder = only_run(tmp_path)
    page = (folder / "report.html").read_text("utf-8")
    assert f"{PACKAGE} export {folder}" in page and "--trainer.max_steps 4" in page
    for name in TYPED:
        assert typed(found[name]) == 0, capsys.readouterr().err
    assert "finished after step 4" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a b", "it's", "$(touch x)", "-x", "a;b"])
def test_a_folder_of_any_name_is_quoted(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / name / name
    (folder / "checkpoints" / "step00000001.ckpt").mkdir(parents=True)
    (folder / "events.out.tfevents.1").touch()
    history = History(folder, config={"data": {"tokenizer": "Bytes"}})
    commands = next_commands(history)
    assert len(commands) == 6
    for command in commands.values():
        words = [word.partition("=")[2] or word for word in shlex.split(command)]
        assert any(Path(word).resolve().is_relative_to(tmp_path / name) for word in words)
        assert "$(touch" not in command or "'" in command
        assert not any(word.startswith("-x") or word in ("b", ";") for word in words)


@pytest.mark.slow
def test_the_next_commands_of_a_plain_module_work(tmp_path: Path, capsys: Any) -> None:
    fit = f"python -m {PLAIN.package} fit --run.root={tmp_path}/runs --trainer.accelerator=cpu"
    fit += " --trainer.devices=1 --trainer.max_epochs=1 --best_checkpoint.monitor=val_loss"
    assert typed(fit, PLAIN) == 0
    found = printed(capsys.readouterr().out)
    assert [*found] == ["TensorBoard", "evaluate", "continue training"]
    assert found["continue training"].endswith("--trainer.max_epochs 2")
    for name in ("evaluate", "continue training"):
        assert typed(found[name], PLAIN) == 0, capsys.readouterr().err
    (file,) = tmp_path.glob("runs/default/*/evaluation/*.json")
    content = json.loads(file.read_text("utf-8"))
    trained, start = (model["figures"]["test_loss"] for model in content["models"])
    assert content["split"] == "test" and trained < start
    assert content["comparisons"][0]["sentence"].startswith(f"test_loss: {trained:.4g}, against")


def test_a_run_without_a_checkpoint_has_no_command_that_needs_one(
    flags: list[str], capsys: Any
) -> None:
    none = ["--trainer.enable_checkpointing=false", "--trainer.logger=false"]
    assert run("fit", *flags, *none, "--trainer.max_steps=1") == 0
    assert printed(capsys.readouterr().out) == {}
