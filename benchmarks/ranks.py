"""A function on several processes of this machine, as ranks that find each other over loopback, as
torchrun's would.

They are forked from one process that has imported torch; each arm gets fresh ones, because a
strategy leaves groups, patches and memory behind. Arms may take turns of some optimizer steps, so
that drift of the machine meets all alike.
"""

import multiprocessing
import os
import secrets
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from dist_template.wings.rehearse.workers import clean_processes
from dist_template.wings.values import free_port

CPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TORCH_WARM_POOL": "0",
}


@dataclass(frozen=True)
class Turns:
    """Of one arm: its place among the arms, and a semaphore for each rank of each arm."""

    semaphores: list[list[Any]]
    arm: int
    steps: int  # optimizer steps of a turn

    def wait(self) -> None:
        """On each rank, until every rank of the arm before has passed the turn on."""
        mine = self.semaphores[self.arm]
        for _ in mine:
            mine[int(os.environ.get("RANK", "0"))].acquire()

    def pass_on(self) -> None:
        """To the next arm, which starts when all ranks of this one have called."""
        for semaphore in self.semaphores[(self.arm + 1) % len(self.semaphores)]:
            semaphore.release()


def turns(arms: int, ranks: int, steps: int) -> list[Turns]:
    """Returns one for each arm; the first arm may start."""
    context = clean_processes()
    first = [[context.Semaphore(0 if arm else ranks) for _ in range(ranks)] for arm in range(arms)]
    return [Turns(first, arm, steps) for arm in range(arms)]


def on_ranks(
    num: int, functions: list[Callable[[], Any]], timeout_s: float = 300.0
) -> list[list[Any]]:
    """Runs each function on `num` CPU processes of its own, all concurrently; returns the results
    by rank. A process that is alone is no rank of a launcher, and all such share one core."""
    os.environ.update(CPU)
    context, processes, started = clean_processes(), [], []
    try:
        for function in functions:
            common = {"WORLD_SIZE": str(num), "LOCAL_WORLD_SIZE": str(num), "GROUP_RANK": "0"}
            common |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
                "DIST_RUN_ID": secrets.token_hex(4),
            }
            for rank in range(num):
                ours, theirs = context.Pipe()
                environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                if num == 1:
                    environment = {"DIST_RUN_ID": common["DIST_RUN_ID"]}
                processes.append(
                    context.Process(target=_serve, args=(theirs, environment, function))
                )
                processes[-1].start()
                theirs.close()
                started.append(ours)
        answers: dict[Any, Any] = {}
        ends = time.monotonic() + timeout_s
        while left := [each for each in started if each not in answers]:
            ready: list[Any] = wait(left, max(0.0, ends - time.monotonic()))
            for connection in ready:
                done, answers[connection] = connection.recv()
                if not done:
                    raise RuntimeError(answers[connection])
            if not ready:
                raise RuntimeError(f"no end after {timeout_s:.0f} s")
        return [
            [answers[each] for each in started[n : n + num]] for n in range(0, len(started), num)
        ]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(connection: Any, environment: dict[str, str], function: Callable[[], Any]) -> None:
    os.environ.update(environment)
    if "RANK" not in environment:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    multiprocessing.set_start_method(None, force=True)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        connection.send((True, function()))
    except BaseException:
        connection.send((False, f"rank {environment.get('RANK', 0)}: {traceback.format_exc()}"))
    # until the parent ends all at once: rank 0 keeps the store that others still need
    connection.poll(None)
