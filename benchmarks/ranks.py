"""A function on N processes of this machine, as ranks that find each other over loopback, as torchrun's would.

They are forked from one process that has imported what loops need, so that an arm starts in a fraction of a second;
each arm gets fresh ones, because a strategy leaves groups, patches and memory behind. (The project's own Workers
do the same for its verbs; a hand-written loop is none of them.)
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCH_WARM_POOL": "0"}
PRELOADED = ["benchmarks.loops.project", "benchmarks.loops.hand_zero", "benchmarks.loops.trainer"]


def on_ranks(num: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 300.0) -> list[Any]:
    """What `function(*arguments)` returns on each of `num` CPU processes, by rank; they end before this does.

    Raises:
        RuntimeError: a rank failed or did not end in time; with the end of what it printed.
    """
    context = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
    context.set_forkserver_preload(PRELOADED)
    os.environ.update(CPU)
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": str(num), "LOCAL_WORLD_SIZE": str(num), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        place |= {"MASTER_PORT": str(probe.getsockname()[1]), "DIST_RUN_ID": Path(folder).name}
        probe.close()
        ranks: list[tuple[Any, Connection]] = []
        try:
            for rank in range(num):
                ours, theirs = context.Pipe()
                environment = place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                log = Path(folder) / f"{rank}.log"
                process = context.Process(
                    target=_serve, args=(theirs, environment, log, timeout_s, function, arguments)
                )
                process.start()
                theirs.close()
                ranks.append((process, ours))
            return [_answer(connection, timeout_s, Path(folder)) for _, connection in ranks]
        finally:
            for process, connection in ranks:
                process.kill()
                process.join()
                connection.close()


def _answer(connection: Connection, timeout_s: float, folder: Path) -> Any:
    if not wait([connection], timeout_s):
        raise RuntimeError(f"no end after {timeout_s:.0f} s\n{_ends(folder)}")
    try:
        done, result = connection.recv()
    except EOFError:
        done, result = False, "its process died"
    if not done:
        raise RuntimeError(f"{result}\n{_ends(folder)}")
    return result


def _ends(folder: Path) -> str:
    logs = sorted(folder.glob("*.log"))
    return "\n".join(f"--- rank {log.stem}\n{log.read_text('utf-8', 'replace')[-3000:]}" for log in logs)


def _serve(
    connection: Connection,
    environment: dict[str, str],
    log: Path,
    timeout_s: float,
    function: Callable[..., Any],
    arguments: Any,
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
            connection.send((True, function(*arguments)))
        except BaseException as error:
            traceback.print_exc()
            connection.send((False, f"rank {environment['RANK']}: {error!r}"))
        connection.poll(None)  # until the parent ends all at once: rank 0 keeps the store that others still need
    os._exit(0)
