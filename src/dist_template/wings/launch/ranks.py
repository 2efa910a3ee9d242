"""Runs the launcher of another library on a node: python -m … python -m accelerate …

SIGTERM and SIGUSR1 end the launchers of accelerate and deepspeed, which kill their ranks, and they
exit with 1, whatever a rank has exited with. Here signals go to the ranks, which save, and each
rank writes its exit code into a file (cluster/launch.py)."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
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
            """Sends a signal to the ranks, to all processes if there are none yet."""
            for process in _ranks(launcher.pid):
                # It may have exited since: an exception here would end all ranks.
                with suppress(psutil.Error):
                    process.send_signal(number)

        for number in (*STOP, signal.SIGINT):
            signal.signal(number, forward)
        code = launcher.wait()
        codes = [int(file.read_text()) for file in Path(folder).iterdir()]
    if not codes:  # no rank has come so far
        codes = [code]
    return Exit.of_all(codes)


def _ranks(launcher: int) -> list[psutil.Process]:
    """Returns the processes to which the launcher has given a rank, without their own children; the
    launcher and all its processes if there are none yet."""
    try:
        started = psutil.Process(launcher)
        children = started.children(recursive=True)
    except psutil.Error:  # it has exited
        return []
    ranked: dict[int, psutil.Process] = {}
    for process in children:
        with suppress(psutil.Error):
            if "LOCAL_RANK" in process.environ():
                ranked[process.pid] = process
    ranks = []
    for process in ranked.values():
        with suppress(psutil.Error):
            if process.ppid() not in ranked:  # a rank's children inherit the variable
                ranks.append(process)
    if ranks:
        return ranks
    return [*children, started]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
