"""Where all ranks meet before their first collective: in the store that the process group will be built with.

A collective fails obscurely, or never ends, when a rank is missing or is not like the others. A store answers: it is
known who has come, and what they bring can be compared. torch makes it in `init_process_group`; here it is made a
moment earlier, at the same address, for torch to share. Works under every launcher that Lightning knows.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..errors import Ended, Exit, local_rank
from .hang import rank_ranges
from .watchdog import WATCHDOG


@dataclass
class Rendezvous:
    """All ranks of a training, once they are there.

    Args:
        store: Which they share; rank 0's process holds it, or torchrun's agent.
        rank: Of this process.
        world_size: Number of ranks.
        timeout_s: How long one waits for another.
    """

    store: Any
    rank: int
    world_size: int
    timeout_s: float

    def put(self, key: str, value: Any) -> None:
        """Show the others this rank's `value`, plain."""
        self.store.set(f"{key}/{self.rank}", json.dumps(value))

    def get(self, key: str) -> list[Any]:
        """Every rank's value, for rank 0.

        Raises:
            Ended: some have not come.
        """
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout_s))
        except dist.DistStoreError:
            missing = [rank for rank, one in enumerate(keys) if not self.store.check([one])]
            sentence = _missing(missing, self.world_size, self.timeout_s)
            self.store.set("meeting/ends", sentence)
            raise Ended(Exit.HUNG, sentence) from None
        return [json.loads(value) for value in self.store.multi_get(keys)]

    def announce(self, key: str, value: Any) -> None:
        """Rank 0 tells all the others."""
        self.store.set("meeting/" + key, json.dumps(value))
        self.store.set("meeting/ends", "")

    def hear(self, key: str) -> Any:
        """What rank 0 announces.

        Raises:
            Ended: it has found that some ranks have not come, or is gone.
        """
        try:
            self.store.wait(["meeting/ends"], timedelta(seconds=self.timeout_s + 5))
            sentence = self.store.get("meeting/ends").decode()
        except RuntimeError:  # torch's DistStoreError and DistNetworkError
            raise _without_rank_zero(self.rank, self.world_size, self.timeout_s) from None
        if sentence:
            raise Ended(Exit.HUNG, sentence)
        return json.loads(self.store.get("meeting/" + key))


def before_first_collective(trainer: Any, timeout_s: float, act: Callable[[Rendezvous], None]) -> None:
    """Let `act` be called when all ranks of `trainer` have been started and none has communicated yet."""
    trainer.strategy.setup_environment = partial(_meet_first, trainer.strategy, timeout_s, act)


def _meet_first(strategy: Any, timeout_s: float, act: Callable[[Rendezvous], None]) -> None:
    if getattr(strategy, "cluster_environment", None) is not None and not dist.is_initialized():
        strategy.set_world_ranks()
        if strategy.world_size > 1:
            if strategy.root_device.type == "cuda":
                torch.cuda.set_device(strategy.root_device)  # or looking at the GPUs would take memory of the first
            _meet(strategy, timeout_s, act)
    type(strategy).setup_environment(strategy)


def _meet(strategy: Any, timeout_s: float, act: Callable[[Rendezvous], None]) -> None:
    rank, world_size = strategy.global_rank, strategy.world_size
    with WATCHDOG.paused():  # the meeting's own limit names who is missing
        meeting = Rendezvous(_store(strategy, rank, world_size, timeout_s), rank, world_size, timeout_s)
        meeting.store.set(f"process/{rank}", f"{_host()} {os.getpid()}")
        act(meeting)
        first = rank - strategy.local_rank
        neighbours = [r for r in range(first, min(first + strategy.num_processes, world_size)) if r != rank]
        peers = _open(meeting.store, neighbours)
    WATCHDOG.connect(meeting.store, rank, world_size, peers)


def _store(strategy: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """As torch.distributed.rendezvous would, but waiting for nobody: so it can be said who is missing.

    Raises:
        Ended: rank 0 is not there.
    """
    environment = strategy.cluster_environment
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = environment.main_address, environment.main_port
    if (rank or agents) and not _listens(address, port, timeout_s):
        raise _without_rank_zero(rank, world_size, timeout_s, f" (at {address}:{port})")
    try:
        store = dist.TCPStore(
            address,
            port,
            world_size,
            is_master=rank == 0 and not agents,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=not agents,
        )
    except dist.DistNetworkError as error:
        if rank == 0:
            raise
        raise _without_rank_zero(rank, world_size, timeout_s, f" (at {address}:{port})") from error
    # The agent's store outlives a restart, and what was said before it.
    return dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store) if agents else store


def _listens(address: str, port: int, timeout_s: float) -> bool:
    """Whether anything listens there within the limit.

    torch's client would wait too, but gives up late, below pages of C++ frames.
    """
    deadline = time.monotonic() + timeout_s
    while (rest := deadline - time.monotonic()) > 0:
        with suppress(OSError):  # refused, or the name is not known yet
            socket.create_connection((address, port), timeout=rest).close()
            return True
        time.sleep(min(0.2, rest))
    return False


def _without_rank_zero(rank: int, world_size: int, timeout_s: float, at: str = "") -> Ended:
    """The end of a rank that waits for rank 0; on rank 0's own node another one must say so."""
    return Ended(Exit.HUNG, f"{_missing([0], world_size, timeout_s)}{at}", local_rank=int(rank == local_rank() > 0))


def _missing(ranks: list[int], world_size: int, timeout_s: float) -> str:
    who = f"rank{'s' * (len(ranks) > 1)} {rank_ranges(ranks)}"
    return (
        f"{who} of {world_size} did not come within {timeout_s:g} s: look at the end of their logs, and whether their"
        " nodes reach rank 0's; watchdog.start_timeout_s is how long a start may take"
    )


def _host() -> str:
    """This machine, or the container on it in which a process number means something."""
    namespace = ""
    with suppress(OSError):  # no Linux
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{platform.node()}{namespace}"


def _open(store: Any, ranks: list[int]) -> dict[int, int]:
    """Rank -> a descriptor of its process, of those on this host; it never comes to mean another process."""
    peers: dict[int, int] = {}
    for rank in ranks if hasattr(os, "pidfd_open") else ():
        host, _, pid = store.get(f"process/{rank}").decode().rpartition(" ")
        if host == _host():
            with suppress(OSError):  # it is gone already, which others will notice
                peers[rank] = os.pidfd_open(int(pid))
    return peers
