"""A served model in a process of its own."""

import faulthandler
import os
import signal
import sys
from pathlib import Path

import httpx

from dist_template.wings.rehearse.workers import clean_processes
from dist_template.wings.values import free_port
from tests.support.line import main
from tests.support.waiting import until


class Server:
    """`serve` in a process forked from one that has imported torch, once it is ready."""

    def __init__(self, model: Path, log: Path, *flags: str, **environment: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        log.touch()
        given = (["serve", str(model), f"--port={port}", *flags], log, os.environ | environment)
        self.process = clean_processes().Process(target=_serve, args=given)
        self.process.start()
        self.states: list[str] = []  # what /ready has answered
        try:
            until(lambda: self._is_ready() or not self.process.is_alive(), "it is not ready")
        except AssertionError:
            self.stop(signal.SIGABRT)  # its stack comes into the log
        assert self.process.is_alive(), log.read_text()

    def _is_ready(self) -> bool:
        try:
            answer = httpx.get(f"{self.url}/ready", timeout=1)
            self.states.append(answer.json()["status"])
            return answer.status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self, number: int = signal.SIGTERM) -> int | None:
        if self.process.is_alive():
            os.kill(self.process.pid or 0, number)
        self.process.join(30)
        return self.process.exitcode


def _serve(argv: list[str], log: Path, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ |= environment
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    faulthandler.enable()
    code = 1
    try:
        code = main(argv)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
