"""Runs the launcher of another library on a node: python -m … python -m accelerate …

SIGTERM and SIGUSR1 end the launchers of accelerate and deepspeed, which kill their ranks, and they
exit with 1, whatever a rank has exited with. Here signals go to the ranks, which save, and each
rank writes its exit code into a file (cluster/launch.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from ...cluster.launch import EXIT_CODES
from ...cluster.signals import STOP, end_with_parent
from ...errors import Exit


def main(command: list[str]) -> int:
    """Returns the exit code of all ranks of this node."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, EXIT_CODES: folder}
        launcher = subprocess.Popen(command, env=environment, preexec_fn=end_with_parent)

        def forward(number: int, _: Any) -> None:
            everything = psutil.Process(launcher.pid).children(recursive=True)
            for each in _ranks(everything) or [*everything, launcher]:
                each.send_signal(number)

        for number in (*STOP, signal.SIGINT):
            signal.signal(number, forward)
        code = launcher.wait()
        codes = [int(file.read_text()) for file in Path(folder).iterdir()]
    return Exit.of_all(codes or [code])


def _ranks(found: list[psutil.Process]) -> list[psutil.Process]:
    """Returns the processes to which a launcher has given a rank, without their own children."""
    ranked = {process.pid for process in found if "LOCAL_RANK" in process.environ()}
    return [one for one in found if one.pid in ranked and one.ppid() not in ranked]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
