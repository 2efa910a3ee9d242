"""Runs Python in a process of its own: nothing removes the device from a process again."""

import os
import subprocess
import sys
from pathlib import Path

import fake_cuda

TIMEOUT_S = 800  # a busy machine compiles the device for minutes


def run(folder: Path, *arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in `folder`, after writing `files` ({name without .py: text}) there."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment["PYTHONPATH"] = str(Path(fake_cuda.__file__).parents[1])
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
