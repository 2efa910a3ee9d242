"""Runs commands on N CPU processes of this machine.

    with Workers(2, project) as workers:
        record = workers.run(["fit", "--config=…", "--trainer.strategy=ddp"], folder, callbacks=[KillAt(5)])
        record.check().loss         # {step: loss}

The command is that of `python -m <package>`. Each command gets new processes, so that no process group, cache or
random state remains from the previous one. They are forked from a process that has already imported torch, Lightning,
transformers and DeepSpeed (multiprocessing's "forkserver"): a start takes 0.1 s instead of 6 s. On macOS, where forking
after such imports is unsafe, each process imports for itself.

The ranks meet over loopback with torchrun's environment variables, so Lightning starts no processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cluster.hang import find_stalled
from ..cluster.launch import RUN_ID
from ..cluster.signals import STARTED
from ..project import Project
from .job import Idle, Job
from .record import RunRecord

if TYPE_CHECKING:
    from lightning.pytorch import Callback

GRACE_S = 20.0  # after one rank has failed, for the other ranks to report
IDLE = "idle"
_WORKER = f"{__package__}.worker"


class Workers:
    """Runs commands of a project, one after the other, on `num` CPU processes.

    Args:
        num: Ranks, each a process with one thread. With 1, there is no process group.
        project: Its module and data are trained.
    """

    def __init__(self, num: int, project: Project) -> None:
        self.num = num
        self.project = project
        self._context = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
        self._context.set_forkserver_preload([_WORKER])
        _start_resource_tracker()
        self._ranks: list[tuple[Any, Connection]] = []  # process, and the parent's end of its pipe

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def run(
        self,
        argv: Sequence[str],
        record: Path,
        *,
        timeout_s: float | None = 300.0,
        idle_s: float = 0.0,
        callbacks: Sequence[Callback] = (),
        prelude: Callable[[], None] | None = None,
        run_id: str | None = None,
    ) -> RunRecord:
        """Runs one command on all ranks and waits for it; an error of a rank is in the returned record.

        Args:
            argv: A verb and its flags. A verb other than fit, validate, test, predict runs on one process.
            record: A new folder for the record, and for the ranks' output as `rank<N>.log`.
            timeout_s: Seconds after which the ranks log their stacks and are killed. None: no limit.
            idle_s: Seconds without progress (`WATCHDOG.beat`) after which each rank reports its position. 0: off.
            callbacks: Appended to the trainer's callbacks; they must pickle.
            prelude: Called in each worker before the command; tests inject faults with it.
            run_id: Name of the run folder under `--run.root` and `--run.name`. None: that of `record`.
        """
        record.mkdir(parents=True, exist_ok=True)
        one = argv[0] not in ("fit", "validate", "test", "predict")
        environment = {RUN_ID: run_id or record.name, STARTED: str(time.time())}  # a job of its own
        job = Job(list(argv), self.project, record.absolute(), callbacks, prelude, environment, timeout_s, idle_s)
        try:
            self._start(1 if one else self.num, job)
            answers = self._wait(timeout_s)
        finally:
            self.kill()
        return RunRecord(record, answers)

    def kill(self) -> None:
        """Kills all remaining processes."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []

    def _start(self, num: int, job: Job) -> None:
        port = _free_port()
        for rank in range(num):
            ours, theirs = self._context.Pipe()
            rank_job = replace(job, environment=job.environment | _rank_environment(rank, num, port))
            process = self._context.Process(target=_serve, args=(theirs, rank_job), name=f"rank {rank}")
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _wait(self, timeout_s: float | None) -> dict[int, str]:
        """Returns how each rank ended: "done", its error, how its process died, or where it hangs."""
        answers: dict[int, str] = {}
        idle: dict[int, dict[str, Any]] = {}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while len(answers) < len(self._ranks):
            open_ends = {connection: rank for rank, (_, connection) in enumerate(self._ranks) if rank not in answers}
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready: list[Any] = wait(list(open_ends), left_s)
            if not ready:
                failed = any(answer not in ("done", IDLE) for answer in answers.values())
                why = "stopped: another rank had failed" if failed else f"hung: no end after {timeout_s or 0:.0f} s"
                answers |= dict.fromkeys(open_ends.values(), IDLE if idle and not failed else why)
                break
            for connection in ready:
                answer = self._answer(rank := open_ends[connection])
                if isinstance(answer, Idle):
                    idle[rank], answer = answer.word, IDLE
                answers[rank] = answer
            if any(answer != "done" for answer in answers.values()):
                grace = time.monotonic() + GRACE_S
                deadline = grace if deadline is None else min(deadline, grace)
        with contextlib.suppress(OSError):  # the rank may have exited
            for _, connection in self._ranks:
                connection.send("exit")  # all have answered: no rank needs another any more
        if idle:
            silent = [rank for rank, answer in answers.items() if answer == IDLE and rank not in idle]
            sentence = f"hung: {find_stalled(idle, silent)['sentence']}"
            answers = {rank: sentence if answer == IDLE else answer for rank, answer in answers.items()}
        return answers

    def _answer(self, rank: int) -> str | Idle:
        process, connection = self._ranks[rank]
        try:
            return connection.recv()
        except (EOFError, OSError):  # the process died before it could answer
            process.join(5)
            return f"killed: exit code {process.exitcode}"


def _start_resource_tracker() -> None:
    """Starts Python's helper that removes resources of killed ranks, without its warnings."""
    before = os.environ.get("PYTHONWARNINGS", "")
    os.environ["PYTHONWARNINGS"] = f"{before},ignore:resource_tracker:UserWarning".lstrip(",")
    resource_tracker.ensure_running()
    os.environ["PYTHONWARNINGS"] = before


def _serve(connection: Connection, job: Job) -> None:
    from .worker import serve  # imports for seconds; the parent does not need it

    serve(connection, job)


def _rank_environment(rank: int, num: int, port: int) -> dict[str, str]:
    """Returns torchrun's environment variables."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"rehearsal-{os.getpid()}-{port}",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
