"""Rank 0 prints warnings; every rank prints errors."""

from __future__ import annotations

import os
import subprocess
import sys

WARN = """
from dist_template.cluster.messages import hide_warnings; hide_warnings()
import warnings, logging
warnings.warn('odd'); logging.getLogger('x').warning('long'); logging.error('bad')
"""


def printed(**environment: str) -> str:
    env = os.environ | environment
    command = [sys.executable, "-c", WARN]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=60, check=False
    ).stderr


def test_rank_0_prints_warnings_and_every_rank_errors() -> None:
    first = printed()
    assert "UserWarning: odd" in first and "long\n" in first and "bad" in first
    assert printed(RANK="3").strip() == "ERROR:root:bad"
    assert printed(RANK="3", DIST_WARNINGS="all") == first
