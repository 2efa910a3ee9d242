"""facts.json and what Lightning writes by itself: the number of steps, and the run's folder."""

import json
from pathlib import Path

import pytest

from dist_template.cli import main as command_line
from tests.support.classifier import MANUAL
from tests.support.runs import only_run

FLAGS = """--run.report=false --trainer.accelerator=cpu --trainer.devices=1 --trainer.max_epochs=1
    --trainer.limit_train_batches=2 --trainer.limit_val_batches=0 --trainer.logger=true"""


@pytest.mark.slow
def test_facts_of_a_module_that_steps_itself_have_no_number_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its two optimizers take four steps in two batches, which nothing knows before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DIST_RUN_ID", raising=False)
    assert command_line.command(["fit", *FLAGS.split()], MANUAL) == 0
    run = only_run(tmp_path)
    assert json.loads((run / "facts.json").read_text())["training"]["max_steps"] is None
    assert [*run.glob("lightning_logs/version_0/*")]  # of `logger: true`
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
