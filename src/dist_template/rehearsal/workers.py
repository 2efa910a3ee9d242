"""Trainings on N processes of this machine's CPU, quick to start and sure to end.

    with Workers(2, project) as workers:
        record = workers.run(["fit", "--config=…", "--trainer.strategy=ddp"], folder, callbacks=[KillAt(5)])
        record.check().loss         # {step: loss}

The command is what `python -m <package>` takes. Each one gets fresh processes, as on a cluster: no group, cache or
random state is left over from the one before. They are forked from one process that has imported torch, Lightning,
transformers and DeepSpeed already (multiprocessing's "forkserver"), so that starting costs a tenth of a second and
not six. Where a process must not be forked after such imports (macOS), each imports for itself.

The ranks find each other over loopback as torchrun's would, so Lightning starts no processes of its own.
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

GRACE_S = 20.0  # for the other ranks, once one has failed: time to say what they saw
IDLE = "idle"
_WORKER = f"{__package__}.worker"


class Workers:
    """`num` CPU processes at a time that run this package's commands, one command after the other.

    Args:
        num: Ranks, each a process with one thread. With 1, Lightning's own default makes no process group.
        project: Whose module and data are trained.
    """

    def __init__(self, num: int, project: Project) -> None:
        self.num = num
        self.project = project
        self._context = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
        self._context.set_forkserver_preload([_WORKER])
        _start_resource_tracker()
        self._ranks: list[tuple[Any, Connection]] = []  # process and our end of its pipe

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
        """Run one command on all ranks and wait for its end, whatever it is; raises nothing that a rank raised.

        Args:
            argv: A verb and its flags. A verb other than fit, validate, test, predict runs on one process.
            record: A new folder for what the ranks write down; their output is there too, as `rank<N>.log`.
            timeout_s: After so long the ranks write their stacks into their logs and are killed. None: no limit.
            idle_s: The same after so long without progress (`WATCHDOG.beat`), of which each rank then reports where it
                is. 0: off.
            callbacks: Appended to the trainer's, after all others; they must pickle.
            prelude: Called in each worker before the command: tests plant faults by it.
            run_id: Name of the run's folder under `--run.root` and `--run.name`. None: that of `record`.
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
        """End every process that is left."""
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
        """What each rank ended with: "done", its error, how its process died, or where it hangs."""
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
        with contextlib.suppress(OSError):  # a rank that is gone already
            for _, connection in self._ranks:
                connection.send("exit")  # all have answered: now none is missed by another
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
    """Python's own helper, which removes what a killed rank leaves behind; here without a warning about each."""
    before = os.environ.get("PYTHONWARNINGS", "")
    os.environ["PYTHONWARNINGS"] = f"{before},ignore:resource_tracker:UserWarning".lstrip(",")
    resource_tracker.ensure_running()
    os.environ["PYTHONWARNINGS"] = before


def _serve(connection: Connection, job: Job) -> None:
    from .worker import serve  # here, not above: it imports what takes seconds, and the parent needs none of it

    serve(connection, job)


def _rank_environment(rank: int, num: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
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
