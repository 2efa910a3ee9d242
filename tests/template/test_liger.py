"""Runs tests/text/test_liger.py with Liger and Triton in a folder that no other test imports from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="Triton supports only Linux")
def test_liger_gives_the_numbers_of_the_chunks_with_tritons_interpreter(tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    install += ["--target", str(tmp_path)]
    subprocess.run([*install, "liger-kernel>=0.8.5,<0.9", "triton>=3.7,<4"], check=True)
    settings = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(tmp_path)}
    settings |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/text/test_liger.py"],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-1000:]
