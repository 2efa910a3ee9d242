"""Runs a command on N CPU processes of this machine.

    record = run_ranks(2, project, ["fit", "--config=…"], folder, callbacks=[KillAt(5)])
    record.check().loss         # {step: loss}

Each command gets new processes, so that no process group, cache or random state remains from the
previous one. They are forked from a process that has imported torch, Lightning, transformers and
DeepSpeed (multiprocessing's "forkserver"): a start takes 0.1 s instead of 6 s. They have torchrun's
environment variables, so that Lightning starts no processes."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from ...cluster.launch import Variable
from ...project import Project
from ..values import free_port
from .record import TRAINING_VERBS, RunRecord

if TYPE_CHECKING:
    from lightning.pytorch import Callback

GRACE_S = 20.0  # after one rank has failed, for the other ranks to report


def clean_processes() -> ForkServerContext | SpawnContext:
    """Returns a multiprocessing context whose processes inherit no thread or lock of this one."""
    context = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
    context.set_forkserver_preload([f"{__package__}.worker"])
    # Python's helper that removes resources of killed ranks is started now, without its warnings.
    warnings = os.environ.get("PYTHONWARNINGS", "")
    os.environ["PYTHONWARNINGS"] = f"{warnings},ignore:resource_tracker:UserWarning".lstrip(",")
    resource_tracker.ensure_running()
    os.environ["PYTHONWARNINGS"] = warnings
    return context


def run_ranks(
    num: int,
    project: Project,
    argv: Sequence[str],
    record: Path,
    *,
    timeout_s: float | None = 300.0,
    callbacks: Sequence[Callback] = (),
    prelude: Callable[[], None] | None = None,
    run_id: str | None = None,
) -> RunRecord:
    """Runs a verb and its flags on `num` ranks of one thread and waits for it; the record has a
    rank's error.

    With one rank, there is no process group; verbs other than TRAINING_VERBS run on one. `record`
    is a new folder for the record and the ranks' logs, `run_id` the name of the run folder, by
    default `record`'s. The ranks are killed after `timeout_s` seconds; None: never. `callbacks`,
    which must pickle, are appended to the trainer's, and `prelude` is called in each worker before
    the command; tests inject faults with it."""
    record.mkdir(parents=True, exist_ok=True)
    context, port = clean_processes(), str(free_port())
    num = num if argv[0] in TRAINING_VERBS else 1
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []  # this process's end, by rank
    try:
        for rank in range(num):
            environment = {  # torchrun's variables
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GROUP_RANK": "0",
                "WORLD_SIZE": str(num),
                "LOCAL_WORLD_SIZE": str(num),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": f"rehearsal-{os.getpid()}-{port}",
                Variable.RUN_ID: run_id or record.name,
                Variable.STARTED: str(time.time()),
            }
            ours, theirs = context.Pipe()
            job = (list(argv), project, record.absolute(), environment, callbacks, prelude)
            process = context.Process(target=_serve, args=(theirs, *job), name=f"rank {rank}")
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return RunRecord(record, _wait(processes, pipes, timeout_s))
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()


def _wait(
    processes: list[BaseProcess], pipes: list[Connection], timeout_s: float | None
) -> dict[int, str]:
    """Returns how each rank ended: "done", its error, its exit code, or that it did not end."""
    answers: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s if timeout_s else float("inf")
    while len(answers) < len(pipes):
        has_failed = bool(set(answers.values()) - {"done"})
        waiting = [rank for rank in range(len(pipes)) if rank not in answers]
        left_s = None  # no limit
        if deadline < float("inf"):
            left_s = max(0.0, deadline - time.monotonic())
        ready = wait([pipes[rank] for rank in waiting], left_s)
        for rank in waiting:
            if pipes[rank] in ready:
                try:
                    answers[rank] = pipes[rank].recv()
                except (EOFError, OSError):  # the process died before it could answer
                    processes[rank].join(5)
                    answers[rank] = f"killed: exit code {processes[rank].exitcode}"
        if not ready:
            answer = f"hung: no end after {timeout_s or 0:.0f} s"
            if has_failed:
                answer = "stopped: another rank had failed"
            answers |= dict.fromkeys(waiting, answer)
        elif set(answers.values()) - {"done"}:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    return answers


def _serve(*job: object) -> None:
    from . import worker  # imports for seconds; the parent does not need it

    worker.serve(*job)  # ty: ignore[invalid-argument-type]
