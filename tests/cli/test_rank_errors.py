"""Bad input that one rank alone has: its sentence is printed, whichever rank it is."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_template.errors import InputError
from tests import ROOT
from tests.lightning.habits.rows import Rows

pytestmark = pytest.mark.slow
FLAGS = "--trainer.accelerator=cpu --trainer.devices=2 --trainer.max_epochs=1".split()
SCRIPT = """
from dist_template import main

module, data = "tests.lightning.habits.rows:Regression", "tests.cli.test_rank_errors:{data}"
raise SystemExit(main(module=module, data=data, package=None))
"""


class OnRank1(Rows):
    def setup(self, stage: str) -> None:
        trainer: Any = self.trainer
        if trainer.global_rank == 1:
            raise InputError("rows.csv is no file: give another")


class OnBoth(Rows):
    def setup(self, stage: str) -> None:
        raise InputError("rows.csv is no file: give another")


@pytest.mark.parametrize(("data", "start"), [("OnRank1", "rank 1: error: "), ("OnBoth", "error: ")])
def test_the_sentence_of_a_rank_is_printed_once(data: str, start: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(data=data), encoding="utf-8")
    argv = [sys.executable, str(script), "fit", *FLAGS, f"--run.root={tmp_path / 'runs'}"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if "rows.csv" in line]
    assert said == [f"{start}rows.csv is no file: give another"], done.stderr
    assert done.returncode != 0 and "Traceback" not in done.stderr
