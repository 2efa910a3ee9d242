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

import psutil

from ...cluster.launch import Variable
from ...cluster.signals import STOP, end_with_parent
from ...errors import Exit


def main(command: list[str]) -> int:
    """Returns the exit code of all ranks of this node."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, Variable.EXIT_CODES: folder}
        launcher = subprocess.Popen(command, env=environment, preexec_fn=end_with_parent)

        def forward(number: int, _: object) -> None:
            """Sends a signal to the processes to which the launcher has given a rank, without
            their own children; to all if there are none yet."""
            found = psutil.Process(launcher.pid).children(recursive=True)
            ranked = {process.pid for process in found if "LOCAL_RANK" in process.environ()}
            ranks = [one for one in found if one.pid in ranked and one.ppid() not in ranked]
            for process in ranks or [*found, launcher]:
                process.send_signal(number)

        for number in (*STOP, signal.SIGINT):
            signal.signal(number, forward)
        code = launcher.wait()
        codes = [int(file.read_text()) for file in Path(folder).iterdir()]
    return Exit.of_all(codes or [code])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
