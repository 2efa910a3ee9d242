"""Runs commands on N CPU processes of this machine.

    with Workers(2, project) as workers:
        record = workers.run(["fit", "--config=…"], folder, callbacks=[KillAt(5)])
        record.check().loss         # {step: loss}

Each command gets new processes, so that no process group, cache or random state remains from the
previous one. They are forked from a process that has imported torch, Lightning, transformers
and DeepSpeed (multiprocessing's "forkserver"): a start takes 0.1 s instead of 6 s. On macOS, where
such a fork is unsafe, each process imports for itself.

The ranks have torchrun's environment variables, so that Lightning starts no processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cluster.environment import free_port
from ...cluster.hang import find_stalled
from ...cluster.launch import RUN_ID
from ...cluster.signals import STARTED
from ...project import Project
from .job import Job
from .record import RunRecord

if TYPE_CHECKING:
    from lightning.pytorch import Callback

GRACE_S = 20.0  # after one rank has failed, for the other ranks to report
IDLE = "idle"
TRAINING_VERBS = ("fit", "validate", "test", "predict")


def clean_processes() -> Any:
    """Returns a multiprocessing context whose processes inherit no thread or lock of this one."""
    context = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
    context.set_forkserver_preload([f"{__package__}.worker"])
    # Python's helper that removes resources of killed ranks is started now, without its warnings.
    before = os.environ.get("PYTHONWARNINGS", "")
    os.environ["PYTHONWARNINGS"] = f"{before},ignore:resource_tracker:UserWarning".lstrip(",")
    resource_tracker.ensure_running()
    os.environ["PYTHONWARNINGS"] = before
    return context


@contextlib.contextmanager
def hashing_with(seed: str | None) -> Generator[None]:
    """Processes that are spawned in this context hash strings with `seed`; None changes nothing."""
    before = os.environ.get("PYTHONHASHSEED")
    try:
        os.environ |= {"PYTHONHASHSEED": seed} if seed else {}
        yield
    finally:
        if seed and before is None:
            del os.environ["PYTHONHASHSEED"]
        os.environ |= {"PYTHONHASHSEED": before} if before else {}


class Workers:
    """Runs commands of a project, one after the other, on `num` CPU processes.

    Args:
        num: Ranks, each a process with one thread. With 1, there is no process group.
        project: Its module and data are trained.
        hash_seed: PYTHONHASHSEED of the ranks, which then import everything anew. None: that of the
            process from which all are forked.
    """

    def __init__(self, num: int, project: Project, hash_seed: str | None = None) -> None:
        self.num = num
        self.project = project
        self.hash_seed = hash_seed
        self._context: Any = clean_processes() if hash_seed is None else get_context("spawn")
        self._ranks: list[tuple[Any, Connection]] = []  # process, and the parent's end of its pipe

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

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
        """Runs one command on all ranks and waits for it; the record has a rank's error.

        Args:
            argv: A verb and its flags. Verbs other than TRAINING_VERBS run on one process.
            record: A new folder for the record, and for the ranks' output as `rank<N>.log`.
            timeout_s: Seconds after which the ranks log their stacks and are killed. None: never.
            idle_s: Seconds without progress (`WATCHDOG.beat`) after which each rank reports its
                position. 0: off.
            callbacks: Appended to the trainer's callbacks; they must pickle.
            prelude: Called in each worker before the command; tests inject faults with it.
            run_id: Name of the run folder. None: that of `record`.
        """
        record.mkdir(parents=True, exist_ok=True)
        environment = {RUN_ID: run_id or record.name, STARTED: str(time.time())}
        job = Job(
            argv=list(argv),
            project=self.project,
            record=record.absolute(),
            callbacks=callbacks,
            prelude=prelude,
            environment=environment,
            timeout_s=timeout_s,
            idle_s=idle_s,
        )
        try:
            self._start(self.num if argv[0] in TRAINING_VERBS else 1, job)
            answers = self._wait(timeout_s)
        finally:
            self._kill()
        return RunRecord(record, answers)

    def _kill(self) -> None:
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []

    def _start(self, num: int, job: Job) -> None:
        port = free_port()
        for rank in range(num):
            ours, theirs = self._context.Pipe()
            environment = job.environment | _rank_environment(rank, num, port)
            arguments = (theirs, replace(job, environment=environment))
            process = self._context.Process(target=_serve, args=arguments, name=f"rank {rank}")
            with hashing_with(self.hash_seed):
                process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _wait(self, timeout_s: float | None) -> dict[int, str]:
        """Returns how each rank ended: "done", its error, its exit code, or where it hangs."""
        answers: dict[int, str] = {}
        idle: dict[int, dict[str, Any]] = {}
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while len(answers) < len(self._ranks):
            waiting = {c: rank for rank, (_, c) in enumerate(self._ranks) if rank not in answers}
            left_s = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
            ready: list[Any] = wait(list(waiting), left_s)
            if not ready:
                failed = any(answer not in ("done", IDLE) for answer in answers.values())
                why = IDLE if idle else f"hung: no end after {timeout_s or 0:.0f} s"
                if failed:
                    why = "stopped: another rank had failed"
                answers |= dict.fromkeys(waiting.values(), why)
                break
            for connection in ready:
                rank = waiting[connection]
                answer = self._answer(rank)
                if isinstance(answer, dict):
                    idle[rank], answer = answer, IDLE
                answers[rank] = answer
            if any(answer != "done" for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        with contextlib.suppress(OSError):  # the rank may have exited
            for _, connection in self._ranks:
                connection.send("exit")  # all have answered: no rank needs another any more
        if idle:
            silent = [r for r, answer in answers.items() if answer == IDLE and r not in idle]
            sentence = f"hung: {find_stalled(idle, silent)['sentence']}"
            answers = {r: sentence if answer == IDLE else answer for r, answer in answers.items()}
        return answers

    def _answer(self, rank: int) -> str | dict[str, Any]:
        process, connection = self._ranks[rank]
        try:
            return connection.recv()
        except (EOFError, OSError):  # the process died before it could answer
            process.join(5)
            return f"killed: exit code {process.exitcode}"


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
