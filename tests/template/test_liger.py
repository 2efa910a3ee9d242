"""The project's tests of its extra `liger`, with Liger and Triton beside the environment: no other test sees them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux alone")
def test_liger_changes_no_number_by_tritons_interpreter(tmp_path: Path) -> None:
    packages = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*packages, "liger-kernel>=0.8.5,<0.9", "triton>=3.7,<4"], check=True)
    settings = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(tmp_path), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/model/test_liger.py"],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-1000:]
