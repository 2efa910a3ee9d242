"""Trainings on N processes of this machine's CPU, quick to start and sure to end.

    with Workers(2) as workers:
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
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cluster.signals import STARTED
from ..history.run import RUN_ID
from .record import RunRecord

if TYPE_CHECKING:
    from lightning.pytorch import Callback

GRACE_S = 20.0  # for the other ranks, once one has failed: time to say what they saw
_WORKER = f"{__package__}.worker"


@dataclass
class Job:
    """One rank's work; crosses to the worker by pickle."""

    argv: list[str]
    record: Path
    callbacks: Sequence[Callback] = ()
    prelude: Callable[[], None] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 300.0


class Workers:
    """`num` CPU processes at a time that run this package's commands, one command after the other.

    Args:
        num: Ranks, each a process with one thread. With 1, Lightning's own default makes no process group.
    """

    def __init__(self, num: int) -> None:
        self.num = num
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
        timeout_s: float = 300.0,
        callbacks: Sequence[Callback] = (),
        prelude: Callable[[], None] | None = None,
        run_id: str | None = None,
    ) -> RunRecord:
        """Run one command on all ranks and wait for its end, whatever it is; raises nothing that a rank raised.

        Args:
            argv: A verb and its flags. A verb other than fit, validate, test, predict runs on one process.
            record: A new folder for what the ranks write down; their output is there too, as `rank<N>.log`.
            timeout_s: After so long the ranks write their stacks into their logs and are killed.
            callbacks: Appended to the trainer's, after all others; they must pickle.
            prelude: Called in each worker before the command: tests plant faults by it.
            run_id: Name of the run's folder under `--run.root` and `--run.name`. None: that of `record`.
        """
        record.mkdir(parents=True, exist_ok=True)
        one = argv[0] not in ("fit", "validate", "test", "predict")
        environment = {RUN_ID: run_id or record.name, STARTED: str(time.time())}  # a job of its own
        job = Job(list(argv), record.absolute(), callbacks, prelude, environment, timeout_s)
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

    def _wait(self, timeout_s: float) -> dict[int, str]:
        """What each rank ended with: "done", its error, or how its process died."""
        answers: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(self._ranks):
            open_ends = {connection: rank for rank, (_, connection) in enumerate(self._ranks) if rank not in answers}
            ready: list[Any] = wait(list(open_ends), max(0.0, deadline - time.monotonic()))
            if not ready:
                failed = any(answer != "done" for answer in answers.values())
                why = "stopped: another rank had failed" if failed else f"hung: no end after {timeout_s:.0f} s"
                answers |= dict.fromkeys(open_ends.values(), why)
                break
            for connection in ready:
                answers[open_ends[connection]] = self._answer(open_ends[connection])
            if any(answer != "done" for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        with contextlib.suppress(OSError):  # a rank that is gone already
            for _, connection in self._ranks:
                connection.send("exit")  # all have answered: now none is missed by another
        return answers

    def _answer(self, rank: int) -> str:
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
