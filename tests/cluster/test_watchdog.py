"""The watchdog of one process, and how it finds the stalled rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from dist_template.cluster.hang import find_stalled
from dist_template.errors import Exit


def python(code: str) -> subprocess.CompletedProcess[str]:
    env = os.environ
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


def test_a_start_that_hangs_in_an_import_is_ended() -> None:
    hangs = """
import sys, time
import dist_template.cli.main as command
from tests.support.line import OURS

class Slow:
    def find_spec(self, name, *_):
        if name == "dist_template.cli.fit":
            time.sleep(60)

sys.meta_path.insert(0, Slow())
command.START_TIMEOUT_S = 1.0
command.run(["fit"], OURS)
"""
    ended = python(hangs)
    assert ended.returncode == Exit.HUNG, ended.stderr
    assert "most recent call first" in ended.stderr
    assert re.search(
        r"^no progress for 1 s: rank 0 is stalled: start-up, importing, .*:9$",
        ended.stderr,
        re.MULTILINE,
    ), ended.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            {0: (7, "a", False), 1: (5, "b", True), 2: (7, "a", True)},
            "rank 1 is stalled: b, f:1; ranks 0, 2 are waiting for it in a",
        ),
        (
            {0: (7, "a", False), 1: (7, "a", True)},
            "rank 0 is stalled: a, f:1; rank 1 is waiting for it in a",
        ),
        (
            {0: (7, "a", True), 2: (7, "a", True)},
            "rank 1 is unresponsive: the process is stopped or its node is lost; ranks 0, 2 are waiting for it in a",
        ),
        (
            {0: (7, "a", True), 1: (7, "b", True)},
            "no rank is behind the others; rank 0 is stalled: a, f:1; rank 1 is stalled: b, f:1",
        ),
    ],
)
def test_the_stalled_rank_is_named(words: dict[int, tuple[int, str, bool]], sentence: str) -> None:
    """Rank: (progress, place, whether it waits for others); a rank in between that is missing does not answer."""
    statuses = {
        r: {"beats": b, "place": p, "waits": waits, "line": "f:1"}
        for r, (b, p, waits) in words.items()
    }
    assert find_stalled(statuses, [r for r in range(max(words)) if r not in words]) == sentence
