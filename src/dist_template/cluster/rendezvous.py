"""Rendezvous of all ranks before their first collective, in the process group's store.

A collective fails obscurely, or never returns, when a rank is missing or differs. A store knows
which ranks have connected, and their values can be compared in it. torch creates it in
`init_process_group`; here it is created a moment earlier at the same address, and torch shares it.
This works under every launcher that Lightning supports."""

from __future__ import annotations

import json
import os
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
from .environment import machine
from .hang import ranks_text
from .watchdog import WATCHDOG


@dataclass
class Rendezvous:
    """The store that all ranks of a training share."""

    store: Any  # in rank 0's process, or in torchrun's agent
    rank: int
    world_size: int
    timeout_s: float  # how long a rank waits for another

    def publish(self, key: str, value: Any) -> None:
        """Stores this rank's `value`, of plain types."""
        self.store.set(f"{key}/{self.rank}", json.dumps(value))

    def gather(self, key: str) -> list[Any]:
        """Returns every rank's value; rank 0 only.

        Raises:
            Ended: some ranks have not published one in time.
        """
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout_s))
        except dist.DistStoreError:
            missing = [rank for rank, one in enumerate(keys) if not self.store.check([one])]
            sentence = _missing(missing, self.world_size, self.timeout_s)
            self.store.set("rendezvous/error", sentence)
            raise Ended(Exit.HUNG, sentence) from None
        return [json.loads(value) for value in self.store.multi_get(keys)]

    def broadcast(self, key: str, value: Any) -> None:
        """Sends `value` to the other ranks; rank 0 only."""
        self.store.set("rendezvous/" + key, json.dumps(value))
        self.store.set("rendezvous/error", "")

    def receive(self, key: str) -> Any:
        """Returns what rank 0 broadcasts.

        Raises:
            Ended: rank 0 is missing other ranks, or is lost itself.
        """
        try:
            self.store.wait(["rendezvous/error"], timedelta(seconds=self.timeout_s + 5))
            error = self.store.get("rendezvous/error").decode()
        except RuntimeError:  # torch's DistStoreError and DistNetworkError
            raise _rank_zero_missing(self.rank, self.world_size, self.timeout_s) from None
        if error:
            raise Ended(Exit.HUNG, error)
        return json.loads(self.store.get("rendezvous/" + key))


Act = Callable[[Rendezvous], None]
_HOSTED: list[Any] = []  # rank 0's store, until the process group has the same one


def agreed(key: str, proposal: str, timeout_s: float) -> str:
    """Returns one rank's proposal, the same on all ranks that a launcher has started.

    It needs the launcher's variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without them,
    and for one rank, it returns `proposal`. Ranks that torchrun restarts get the first answer.

    Raises:
        Ended: rank 0 is missing.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank, world_size, address, port = (os.environ.get(name, "") for name in names)
    if not (rank and address and port) or int(world_size or 1) < 2:
        return proposal
    with WATCHDOG.paused():
        store = _open(address, int(port), int(rank), int(world_size), timeout_s)
    if int(rank) == 0:
        _HOSTED.append(store)
    return store.compare_set(key, "", proposal).decode()


def before_first_collective(trainer: Any, timeout_s: float, act: Act) -> None:
    """Has `act` called when all ranks of `trainer` are started and none has communicated yet."""
    strategy = trainer.strategy
    strategy.setup_environment = partial(_setup_environment, strategy, timeout_s, act)


def _setup_environment(strategy: Any, timeout_s: float, act: Act) -> None:
    if getattr(strategy, "cluster_environment", None) is not None and not dist.is_initialized():
        strategy.set_world_ranks()
        if strategy.world_size > 1:
            if strategy.root_device.type == "cuda":
                torch.cuda.set_device(
                    strategy.root_device
                )  # else queries allocate on the first GPU
            _connect(strategy, timeout_s, act)
    type(strategy).setup_environment(strategy)


def _connect(strategy: Any, timeout_s: float, act: Act) -> None:
    rank, world_size = strategy.global_rank, strategy.world_size
    with WATCHDOG.paused():  # the rendezvous has its own limit, and names the missing ranks
        store = _store(strategy, rank, world_size, timeout_s)
        store.set(f"process/{rank}", f"{machine()} {os.getpid()}")
        act(Rendezvous(store, rank, world_size, timeout_s))
        first = rank - strategy.local_rank
        of_node = set(range(first, min(first + strategy.num_processes, world_size)))
        peers = _open_processes(store, sorted(of_node - {rank}))
    WATCHDOG.connect(store, rank, world_size, peers)


def _store(strategy: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """Creates the store as torch does, but does not wait for all ranks: missing ones are named.

    Raises:
        Ended: rank 0 is missing.
    """
    environment = strategy.cluster_environment
    address, port = environment.main_address, environment.main_port
    store = _open(address, port, rank, world_size, timeout_s)
    # The agent's store outlives a restart, with the keys of the attempt before.
    if not _is_in_agent():
        return store
    return dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)


def _is_in_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open(address: str, port: int, rank: int, world_size: int, timeout_s: float) -> Any:
    in_agent = _is_in_agent()
    lost = _rank_zero_missing(rank, world_size, timeout_s, f" (at {address}:{port})")
    if (rank or in_agent) and not _accepts_connections(address, port, timeout_s):
        raise lost
    is_master, timeout = rank == 0 and not in_agent, timedelta(seconds=timeout_s)
    shared: dict[str, bool] = {"wait_for_workers": False, "multi_tenant": not in_agent}
    try:
        return dist.TCPStore(address, port, world_size, is_master, timeout, **shared)
    except dist.DistNetworkError as error:
        if rank == 0:
            raise
        raise lost from error


def _accepts_connections(address: str, port: int, timeout_s: float) -> bool:
    """Returns whether a server listens there. torch's client gives up later, with C++ frames."""
    deadline = time.monotonic() + timeout_s
    while (rest := deadline - time.monotonic()) > 0:
        with suppress(OSError):  # refused, or the host name is not known yet
            socket.create_connection((address, port), timeout=rest).close()
            return True
        time.sleep(min(0.2, rest))
    return False


def _rank_zero_missing(rank: int, world_size: int, timeout_s: float, at: str = "") -> Ended:
    """On rank 0's own node another rank must print it."""
    sentence = f"{_missing([0], world_size, timeout_s)}{at}"
    return Ended(Exit.HUNG, sentence, local_rank=int(rank == local_rank() > 0))


def _missing(ranks: list[int], world_size: int, timeout_s: float) -> str:
    return (
        f"{ranks_text(ranks)} of {world_size} did not connect within {timeout_s:g} s: check the end"
        " of their logs, and whether their nodes reach rank 0's; watchdog.start_timeout_s is the"
        " limit"
    )


def _open_processes(store: Any, ranks: list[int]) -> dict[int, int]:
    """Returns rank -> file descriptor of its process, on this host; ids may be reused."""
    peers: dict[int, int] = {}
    for rank in ranks if hasattr(os, "pidfd_open") else ():
        host, _, pid = store.get(f"process/{rank}").decode().rpartition(" ")
        if host == machine():
            with suppress(OSError):  # it has exited already, which other ranks will notice
                peers[rank] = os.pidfd_open(int(pid))
    return peers
