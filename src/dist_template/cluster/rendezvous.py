"""Rendezvous of all ranks before their first collective, in the process group's store.

A store knows which ranks have connected, and rank 0 can compare their values in it. torch creates
it in `init_process_group`; here it is created a moment earlier at the same address, and torch
shares it.

1  A launcher has started the processes; they agree on the run's folder (`agreed`).
2  When Lightning sets up its environment, each rank connects (`before_first_collective`). Rank 0
   hosts the store, unless torchrun's agent does; the others try until it is there.
3  All ranks put values into the store, rank 0 answers, or names the ranks that are missing
   (`Rendezvous.ask`).
4  The watchdog keeps the store, by which ranks exchange where they are."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ..compat.lightning import before_setup_environment
from ..errors import Ended, Exit, local_rank
from .hang import rank_ranges
from .watchdog import WATCHDOG, absent

if TYPE_CHECKING:
    from lightning import Trainer

T = TypeVar("T")
_first_stores: list[dist.Store] = []


@dataclass
class Rendezvous:
    """The store that all ranks of a training share. Its values are of JSON's types."""

    store: dist.Store  # in rank 0's process, or in torchrun's agent
    rank: int
    world_size: int
    timeout_s: float  # how long a rank waits for another

    def ask(
        self,
        key: str,
        value: object,
        answer: Callable[[list[Any]], T],
        ranks: Iterable[int] | None = None,
    ) -> T:
        """Returns on every rank what rank 0 answers to the values of `ranks` (None: all), which
        only rank 0 reads, so that the store sends one answer to a rank. Collective; raises Ended if
        some have not called it in time."""
        asked = list(range(self.world_size) if ranks is None else ranks)
        try:
            if self.rank in asked:
                self.store.set(f"{key}/{self.rank}", json.dumps(value))
            if self.rank == 0:
                self.store.set(f"{key}/answer", json.dumps(self._read(key, asked, answer)))
            # Longer than rank 0 waits for the values: it names the missing ranks.
            self.store.wait([f"{key}/answer"], timedelta(seconds=self.timeout_s + 5))
            missing, found = json.loads(self.store.get(f"{key}/answer"))
        except (dist.DistStoreError, dist.DistNetworkError):
            raise _rank_zero_missing(self.rank, self.world_size, self.timeout_s) from None
        if missing:
            self.leave(set(range(self.world_size)) - set(missing))
            raise Ended(Exit.HUNG, _missing(missing, self.world_size, self.timeout_s))
        return found

    def _read(
        self, key: str, ranks: list[int], answer: Callable[[list[Any]], object]
    ) -> tuple[list[int], object]:
        """Returns the ranks whose values are missing, and rank 0's answer if none is."""
        keys = [f"{key}/{rank}" for rank in ranks]
        with suppress(dist.DistStoreError):
            self.store.wait(keys, timedelta(seconds=self.timeout_s))
        missing = absent(self.store, keys)
        if missing:
            return [ranks[index] for index in missing], None
        values = [json.loads(text) for text in self.store.multi_get(keys)]
        return [], answer(values)

    def leave(self, ranks: Iterable[int] | None = None) -> None:
        """Call it before `ranks` (None: all) exit: rank 0 waits for the others, as the store may be
        in its process."""
        self.store.set(f"left/{self.rank}", "")
        if self.rank == 0:
            with suppress(RuntimeError):  # another rank is lost
                ranks = range(self.world_size) if ranks is None else ranks
                self.store.wait([f"left/{rank}" for rank in ranks], timedelta(seconds=5))


def agreed(key: str, value: str, timeout_s: float) -> str:
    """Returns rank 0's value of `key` on every rank that a launcher has started, before Lightning
    knows of the ranks. Collective; raises Ended if rank 0 does not answer in time."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = _open(address, port, rank, world_size, timeout_s)
    # Kept, because the stores that the ranks open next share rank 0's server.
    _first_stores.append(store)
    # An agent's store outlives a restart, with the keys of the attempt before.
    key = f"{key} {os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    try:
        if rank == 0:
            store.set(key, value)
        return store.get(key).decode()
    except (dist.DistStoreError, dist.DistNetworkError):
        raise _rank_zero_missing(rank, world_size, timeout_s) from None


def before_first_collective(
    trainer: Trainer, timeout_s: float, function: Callable[[Rendezvous], None]
) -> None:
    """Calls `function` when all ranks of `trainer` are started and none has communicated yet."""
    strategy: Any = trainer.strategy

    def start() -> None:
        if getattr(strategy, "cluster_environment", None) is None or dist.is_initialized():
            return
        strategy.set_world_ranks()
        if strategy.world_size > 1:
            if strategy.root_device.type == "cuda":  # else queries allocate on the first GPU
                torch.cuda.set_device(strategy.root_device)
            connect(strategy, timeout_s, function)

    before_setup_environment(strategy, start)


def connect(strategy: Any, timeout_s: float, function: Callable[[Rendezvous], None]) -> None:
    """Connects a rank to the store, calls `function`, and gives the watchdog the store."""
    rank, world_size = strategy.global_rank, strategy.world_size
    environment = strategy.cluster_environment
    with WATCHDOG.paused():  # the rendezvous has its own limit, and names the missing ranks
        store = _open(environment.main_address, environment.main_port, rank, world_size, timeout_s)
        if _is_in_agent():  # which outlives a restart, with the keys of the attempt before
            store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
        function(Rendezvous(store, rank, world_size, timeout_s))
    WATCHDOG.connect(store, rank, world_size)


def _is_in_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open(address: str, port: int, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Opens the store as torch does, but does not wait for all ranks: missing ones are named."""
    is_host = rank == 0 and not _is_in_agent()
    deadline = time.monotonic() + timeout_s
    # torch's own client would give up later, with C++ frames.
    while not is_host:
        with suppress(OSError):  # refused, or the host name is not known yet
            socket.create_connection((address, port), timeout=timeout_s).close()
            break
        if time.monotonic() > deadline:
            raise _rank_zero_missing(rank, world_size, timeout_s, f" (at {address}:{port})")
        time.sleep(0.2)
    return dist.TCPStore(
        address,
        port,
        world_size,
        is_host,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=not _is_in_agent(),
    )


def _rank_zero_missing(rank: int, world_size: int, timeout_s: float, at: str = "") -> Ended:
    """On rank 0's own node another rank must print it."""
    sentence = f"{_missing([0], world_size, timeout_s)}{at}"
    return Ended(Exit.HUNG, sentence, local_rank=int(rank == local_rank() > 0))


def _missing(ranks: list[int], world_size: int, timeout_s: float) -> str:
    return (
        f"rank {rank_ranges(ranks)} of {world_size} did not connect within {timeout_s:g} s"
        " (watchdog.start_timeout_s): check the end of their logs, and whether their nodes reach"
        " rank 0's"
    )
