"""Warnings of other ranks reach the terminal once, by rank 0, and none is lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dist_template.callbacks.messages import new_lines
from tests.support.runs import Workers
from tests.support.warns import Warns


def test_equal_texts_share_a_line_and_are_printed_once() -> None:
    printed = {"the disk is slow"}  # by rank 0 itself
    ranks = [[], ["the disk is slow", "odd"], ["the disk is slow", "on cuda:2"], ["the disk is slow", "on cuda:3"]]
    assert new_lines(ranks, printed) == ["rank 1: odd", "rank 2: on cuda:2"]
    assert new_lines(ranks, printed) == [], "all of it was printed"
    assert new_lines([[], ["odd"], ["even"], []], printed) == ["rank 2: even"]


def test_a_warning_of_rank_0_about_its_device_is_not_repeated_for_the_others() -> None:
    assert new_lines([[], ["on cuda:1, 16 GB"], ["on cuda:2, 16 GB"]], {"on cuda:0, 16 GB"}) == []


def process(code: str, **environment: str) -> str:
    """Returns standard error of a process that runs `code`."""
    env = os.environ | environment
    code = f"from dist_template.cluster.messages import MESSAGES; MESSAGES.listen()\n{code}"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    return ended.stderr


WARN = "import warnings, logging, os; warnings.warn('w'); logging.getLogger('x').warning('l'); logging.error('bad')\n"


def test_rank_0_prints_at_once_and_another_rank_at_its_exit() -> None:
    printed = process(WARN + "os._exit(0)")
    assert "UserWarning: w" in printed and "l\n" in printed and "bad" in printed and "rank" not in printed
    printed = process(WARN + "os._exit(0)", RANK="3")
    assert printed.strip() == "ERROR:root:bad", "errors are not buffered"
    printed = process(WARN, RANK="3")
    assert re.findall(r"rank 3: (\w+)", printed) == ["UserWarning", "x"]


def test_a_crash_flushes_the_buffer() -> None:
    printed = process(WARN + "raise RuntimeError('dead')", LOCAL_RANK="1")
    assert "rank 1: UserWarning: w" in printed and "RuntimeError: dead" in printed


def test_a_forked_process_prints_its_own_warnings() -> None:
    code = "import os\nif not os.fork():\n    " + WARN + "    os._exit(0)\nos.wait(); os._exit(0)"
    printed = process(code, RANK="1")
    assert "UserWarning: w" in printed


@pytest.mark.slow
def test_two_ranks_print_their_warnings_once_on_rank_0(flags: list[str], tmp_path: Path) -> None:
    flags = [*flags, "--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.max_steps=8"]
    flags += ["--trainer.val_check_interval=100", "--last_checkpoint.every_n_steps=100"]
    with Workers(2) as workers:
        workers.run(["prepare", *flags], tmp_path / "prepare").check()
        record = workers.run(["fit", *flags], tmp_path / "w", callbacks=[Warns()]).check()
    first, second = record.log(0), record.log(1)
    assert first.count("all say this") == 2, "rank 0's own, with its source line"
    assert first.count("rank 1: UserWarning: only rank 1 says this") == 1
    assert first.count("rank 1: some.library: a library's log") == 1
    assert "says this" not in second and "a library" not in second
    assert re.findall("gathers: (.*)", first) == ["0"], "no collective between validations"
