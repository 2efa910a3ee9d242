"""The watchdog of one process, and how it finds the stalled rank."""

import re
import subprocess
import sys

import pytest

from dist_template.cluster.hang import find_stalled
from dist_template.errors import Exit


@pytest.mark.slow
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
    command = [sys.executable, "-c", hangs]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == Exit.HUNG, ended.stderr
    assert "most recent call first" in ended.stderr
    said = r"^no progress for 1 s: rank 0 is stalled: start-up, importing, .*:9$"
    assert re.search(said, ended.stderr, re.MULTILINE), ended.stderr


A, B, A_WAITS = (7, "a", False), (5, "b", True), (7, "a", True)
STALLED = [
    ({0: A, 1: B, 2: A_WAITS}, "rank 1 is stalled: b, f:1; ranks 0, 2 are waiting for it in a"),
    ({0: A, 1: A_WAITS}, "rank 0 is stalled: a, f:1; rank 1 is waiting for it in a"),
    ({0: A_WAITS, 2: A_WAITS}, "rank 1 is unresponsive: the process is stopped or its node is lost;"
     " ranks 0, 2 are waiting for it in a"),
    ({0: A_WAITS, 1: (7, "b", True)}, "no rank is behind the others; rank 0 is stalled: a, f:1;"
     " rank 1 is stalled: b, f:1"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "sentence"), STALLED)
def test_the_stalled_rank_is_named(words: dict[int, tuple[int, str, bool]], sentence: str) -> None:
    """Rank: (progress, place, whether it waits); a rank that is missing does not answer."""
    names = ("beats", "place", "waits")
    statuses = {r: dict(zip(names, of, strict=True)) | {"line": "f:1"} for r, of in words.items()}
    assert find_stalled(statuses, [r for r in range(max(words)) if r not in words]) == sentence
