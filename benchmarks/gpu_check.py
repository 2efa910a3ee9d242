"""One NVIDIA GPU: runs tests/parallel/test_gpu.py there, and keeps what it found.

    parity   the losses of each strategy that one device can run, over the CPU's; bf16-mixed over 32-true
    syncs    a plain step does not wait for the device
    nan      a gradient that is not finite is skipped, with the optimizer on the device and on the host
    zero3    ZeRO-3 ends well after a step that is no validation, with its state on the device and on the host

Each takes less than nine minutes and is chosen with `--arms parity,nan`. A check that fails is a row with its last
line; the terminal has the rest. `--quick` runs every line on a CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from . import ROOT
from .gpu import require_gpu
from .record import Figure, Options, Result

NAME = "gpu-check"
TESTS = ROOT / "tests" / "parallel" / "test_gpu.py"


def run(options: Options) -> Result:
    require_gpu(NAME, options)
    result = Result(NAME)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", str(TESTS), "-n", "0", f"--junitxml={path}"]
        command += ["-k", " or ".join(f"test_{each.strip()}" for each in options.arms.split(","))] * bool(options.arms)
        subprocess.run(command, cwd=ROOT, env=os.environ | {"DIST_GPU_TESTS_ON": "cpu"} if options.quick else None)
        for case in ElementTree.parse(path).iter("testcase"):
            what = case.get("name", "").removeprefix("test_")
            failures = [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]
            lines = (failures[0].get("message") or "no message").strip().splitlines() if failures else []
            why = lines[-1][:200].replace("|", "/") if lines else ""
            result.put(Figure(f"{what}: passed", [] if why else [1.0], at_least=1, instead=why))
    return result
