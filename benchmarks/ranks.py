"""A function on N processes of this machine, as ranks that find each other over loopback, as torchrun's would.

They are forked from one process that has imported what loops need, so that an arm starts in a fraction of a second;
each arm gets fresh ones, because a strategy leaves groups, patches and memory behind. (The project's own Workers
do the same for its verbs; a hand-written loop does not.)
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import secrets
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCH_WARM_POOL": "0"}
PRELOADED = ["benchmarks.loops.project", "benchmarks.loops.hand_zero", "benchmarks.loops.trainer"]


def on_ranks(num: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 300.0) -> list[Any]:
    """What `function(*arguments)` returns on each of `num` CPU processes, by rank; they end before this does.

    Raises:
        RuntimeError: a rank failed or did not end in time; with the end of what the ranks printed.
    """
    return side_by_side(num, [partial(function, *arguments)], timeout_s)[0]


def side_by_side(num: int, functions: list[Callable[[], Any]], timeout_s: float = 300.0) -> list[list[Any]]:
    """As `on_ranks` of each function, all at a time, each on `num` processes of its own.

    They may take turns (turns.py), or be in each other's way.
    """
    context = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
    context.set_forkserver_preload(PRELOADED)
    os.environ.update(CPU)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started: list[list[Connection]] = []
        for number, function in enumerate(functions):
            started.append([])
            for rank, environment in enumerate(_environments(num)):
                ours, theirs = context.Pipe()
                log = folder / f"{number}_{rank}.log"
                process: Any = context.Process(target=_serve, args=(theirs, environment, log, timeout_s, function))
                process.start()
                theirs.close()
                stack.callback(ours.close)
                stack.callback(process.join)
                stack.callback(process.kill)
                started[-1].append(ours)
        answers = _answers([each for ranks in started for each in ranks], timeout_s, folder)
        return [[answers[each] for each in ranks] for ranks in started]


def _environments(num: int) -> list[dict[str, str]]:
    """Of each rank, as torchrun would set them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": str(num), "LOCAL_WORLD_SIZE": str(num), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(port), "DIST_RUN_ID": secrets.token_hex(4)}
    return [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num)]


def _answers(connections: list[Connection], timeout_s: float, folder: Path) -> dict[Connection, Any]:
    answers: dict[Connection, Any] = {}
    ends = time.monotonic() + timeout_s
    while left := [each for each in connections if each not in answers]:
        ready: list[Any] = wait(left, max(0.0, ends - time.monotonic()))
        if not ready:
            raise RuntimeError(f"no end after {timeout_s:.0f} s\n{_ends(folder)}")
        for connection in ready:
            try:
                done, result = connection.recv()
            except EOFError:
                done, result = False, "a process died"
            if not done:
                raise RuntimeError(f"{result}\n{_ends(folder)}")
            answers[connection] = result
    return answers


def _ends(folder: Path) -> str:
    logs = sorted(folder.glob("*.log"))
    return "\n".join(f"--- rank {log.stem}\n{log.read_text('utf-8', 'replace')[-3000:]}" for log in logs)


def _serve(
    connection: Connection,
    environment: dict[str, str],
    log: Path,
    timeout_s: float,
    function: Callable[[], Any],
) -> None:
    import torch

    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)
    with log.open("a", encoding="utf-8", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        torch.set_num_threads(1)
        faulthandler.dump_traceback_later(0.9 * timeout_s, file=file)  # where a rank stands that does not end
        try:
            connection.send((True, function()))
        except BaseException as error:
            traceback.print_exc()
            connection.send((False, f"rank {environment['RANK']}: {error!r}"))
        connection.poll(None)  # until the parent ends all at once: rank 0 keeps the store that others still need
    os._exit(0)
