"""Runs commands on N CPU processes of this machine.

    with Workers(2, project) as workers:
        record = workers.run(["fit", "--config=…"], folder, callbacks=[KillAt(5)])
        record.check().loss         # {step: loss}

Each command gets new processes, so that no process group, cache or random state remains from the previous one. They are
forked from a process that has imported torch, Lightning, transformers and DeepSpeed (multiprocessing's "forkserver"): a
start takes 0.1 s instead of 6 s. On macOS, where such a fork is unsafe, each process imports for itself.

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
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from ...cluster.hang import find_stalled
from ...cluster.launch import Variable
from ...project import Project
from ..values import free_port
from .record import Job, RunRecord

if TYPE_CHECKING:
    from lightning.pytorch import Callback

GRACE_S = 20.0  # after one rank has failed, for the other ranks to report
IDLE = "idle"
TRAINING_VERBS = ("fit", "validate", "test", "predict")
Status = dict[str, object]  # of a rank without progress, see WatchdogThread.status


def clean_processes() -> ForkServerContext | SpawnContext:
    """Returns a multiprocessing context whose processes inherit no thread or lock of this one."""
    context = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
    context.set_forkserver_preload([f"{__package__}.worker"])
    # Python's helper that removes resources of killed ranks is started now, without its warnings.
    warnings = os.environ.get("PYTHONWARNINGS", "")
    with _environment(PYTHONWARNINGS=f"{warnings},ignore:resource_tracker:UserWarning".lstrip(",")):
        resource_tracker.ensure_running()
    return context


def hashing_with(seed: str | None) -> contextlib.AbstractContextManager[None]:
    """Processes that are spawned in this context hash strings with `seed`; None changes nothing."""
    return _environment(PYTHONHASHSEED=seed) if seed else contextlib.nullcontext()


@contextlib.contextmanager
def _environment(**variables: str) -> Generator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}


class Workers:
    """Runs commands of a project, one after the other, on `num` CPU processes of one thread.

    With 1, there is no process group. With a `hash_seed` (PYTHONHASHSEED), ranks are not forked:
    they import everything anew.
    """

    def __init__(self, num: int, project: Project, hash_seed: str | None = None) -> None:
        self.num = num
        self.project = project
        self.hash_seed = hash_seed
        self._context = clean_processes() if hash_seed is None else get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []  # this process's end, by rank

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
            record: A new folder for the record and the ranks' logs.
            timeout_s: Seconds after which the ranks log their stacks and are killed. None: never.
            idle_s: Seconds without progress (`WATCHDOG.beat`) after which each rank reports its position. 0: off.
            callbacks: Appended to the trainer's callbacks; they must pickle.
            prelude: Called in each worker before the command; tests inject faults with it.
            run_id: Name of the run folder. None: `record`'s name.
        """
        record.mkdir(parents=True, exist_ok=True)
        folder = record.absolute()
        job = Job([*argv], self.project, folder, callbacks, prelude, timeout_s, idle_s)
        num, port = self.num if argv[0] in TRAINING_VERBS else 1, str(free_port())
        try:
            for rank in range(num):
                environment = {  # torchrun's variables
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0",
                    "WORLD_SIZE": str(num), "LOCAL_WORLD_SIZE": str(num),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                    "TORCHELASTIC_RUN_ID": f"rehearsal-{os.getpid()}-{port}",
                    Variable.RUN_ID: run_id or record.name, Variable.STARTED: str(time.time()),
                }  # fmt: skip
                self._start(replace(job, environment=environment), f"rank {rank}")
            return RunRecord(record, self._wait(timeout_s))
        finally:
            self._kill()

    def _start(self, job: Job, name: str) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, job), name=name)
        with hashing_with(self.hash_seed):
            process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def _kill(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []

    def _wait(self, timeout_s: float | None) -> dict[int, str]:
        """Returns how each rank ended: "done", its error, its exit code, or where it hangs."""
        answers: dict[int, str] = {}
        idle: dict[int, Status] = {}
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while len(answers) < len(self._pipes):
            left_s = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
            waiting = sorted({*range(len(self._pipes))} - answers.keys())
            ready = wait([self._pipes[rank] for rank in waiting], left_s)
            for rank in waiting:
                if self._pipes[rank] in ready:
                    answer = self._answer(rank)
                    if isinstance(answer, dict):
                        idle[rank], answer = answer, IDLE
                    answers[rank] = answer
            has_failed = bool(set(answers.values()) - {"done", IDLE})
            if not ready:
                why = IDLE if idle else f"hung: no end after {timeout_s or 0:.0f} s"
                if has_failed:
                    why = "stopped: another rank had failed"
                answers |= dict.fromkeys(waiting, why)
            elif has_failed or idle:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        for pipe in self._pipes:  # all have answered: no rank needs another any more
            with contextlib.suppress(OSError):  # the rank may have exited
                pipe.send("exit")
        if idle:
            silent = [r for r, answer in answers.items() if answer == IDLE and r not in idle]
            sentence = f"hung: {find_stalled(idle, silent)}"
            for rank in (*idle, *silent):
                answers[rank] = sentence
        return answers

    def _answer(self, rank: int) -> str | Status:
        try:
            return self._pipes[rank].recv()
        except (EOFError, OSError):  # the process died before it could answer
            self._processes[rank].join(5)
            return f"killed: exit code {self._processes[rank].exitcode}"


def _serve(connection: Connection, job: Job) -> None:
    from .worker import serve  # imports for seconds; the parent does not need it

    serve(connection, job)
