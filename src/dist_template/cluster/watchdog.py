"""Watchdog thread: detects a hang, reports the stalled rank, and ends all ranks with Exit.HUNG.

Training reports progress with `WATCHDOG.beat()`, which sets two attributes. When a rank makes none
for `limit_s` seconds, each rank prints the stacks of its threads and publishes its status in the
store of rendezvous.py; rank 0 prints which rank is behind."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..compat.stacks import locate
from ..errors import Exit
from .hang import find_stalled
from .launch import record_exit

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["WATCHDOG"]

START_TIMEOUT_S = 1800.0  # until the configuration has been read
POLL_S = 0.1
ANSWER_S = 0.3  # rank 0 waits this long for the others' statuses
VERDICT_S = 1.2  # the others wait this long for rank 0, which may detect it one poll later
EXIT_S = 0.3  # every rank stays this long, for the others to read the store
RANKS_PER_S = 2000  # statuses that a store answers: all of the above are longer by it


class WatchdogThread:
    """Watches the progress of this process. `WATCHDOG` is the only instance."""

    def __init__(self) -> None:
        self.beats = 0
        self.limit_s = 0.0  # 0: off
        self.position: Callable[[str], str] = lambda phase: f"start-up, {phase}"
        self.rank, self.world_size = 0, 1
        self.is_exiting = False
        self._store: Store | None = None
        self._last = time.monotonic()
        self._thread: threading.Thread | None = None
        self._query: threading.Thread | None = None
        self._is_called = False  # by a rank that has detected the hang
        self._queried = self.all_ranks_s = (
            0.0  # the time in which all ranks can query the store once
        )

    def beat(self) -> None:
        """Reports progress that every rank makes equally."""
        self.beats += 1
        self._last = time.monotonic()

    def keep_alive(self) -> None:
        """Reports progress of this process alone, by which ranks are not compared."""
        self._last = time.monotonic()

    def report(self, text: str) -> None:
        """Prints a line about such work."""
        self.keep_alive()
        print(text)

    def start(self, limit_s: float) -> None:
        """Ends this process after `limit_s` seconds without progress; 0 turns it off."""
        self.beat()
        self.limit_s = limit_s
        if self._thread is None:
            self._thread = _start_thread(self._watch)

    def stop(self) -> None:
        """Turns the watchdog off and forgets the other ranks."""
        self.limit_s = 0.0
        self.connect(None, 0, 1)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Turns the watchdog off for a block with a limit of its own."""
        limit_s, self.limit_s = self.limit_s, 0.0
        try:
            yield
        finally:
            self.beat()
            self.limit_s = limit_s

    def connect(self, store: Store | None, rank: int, world_size: int) -> None:
        """Lets the ranks exchange statuses; progress is counted from here, where all ranks are at
        the same point."""
        self._store, self.rank, self.world_size = store, rank, world_size
        self.all_ranks_s = world_size / RANKS_PER_S
        self.beats = 0

    def status(self) -> dict[str, Any]:
        """Returns where this rank is, for `find_stalled`."""
        phase, line, waits = locate(sys._current_frames().get(threading.main_thread().ident or 0))
        place = phase
        with suppress(Exception):  # the trainer may be half built; the stacks matter more
            place = self.position(phase)
        return {"beats": self.beats, "place": place, "line": line, "waits": waits}

    # ---- the thread ------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_S)
            limit_s, idle_s = self.limit_s, time.monotonic() - self._last
            if limit_s and (idle_s >= limit_s or (idle_s >= limit_s / 2 and self._check_call())):
                try:
                    self._report_hang(limit_s)
                finally:
                    record_exit(Exit.HUNG)
                    os._exit(Exit.HUNG)

    def _check_call(self) -> bool:
        """Returns whether another rank has detected the hang. The store's host may hang itself."""
        store, is_free = self._store, self._query is None or not self._query.is_alive()
        if store is not None and is_free and time.monotonic() - self._queried > self.all_ranks_s:
            self._queried = time.monotonic()

            def ask() -> None:
                with suppress(RuntimeError):
                    self._is_called = store.check(["hung"])

            self._query = _start_thread(ask)
            self._query.join(POLL_S / 2)
        return self._is_called

    def _report_hang(self, limit_s: float) -> None:
        self.is_exiting = True
        status = self.status()
        head = (
            f"\nno progress for {limit_s:g} s; rank {self.rank}: {status['place']},"
            f" {status['line']}; its stacks:\n"
        )
        os.write(2, head.encode())
        faulthandler.dump_traceback(2, all_threads=True)
        found: list[str] = []
        if (store := self._store) is None:
            found = [find_stalled({self.rank: status}, [])]
        else:
            _start_thread(self._exchange, store, status, found).join(
                VERDICT_S + 3 * self.all_ranks_s + POLL_S / 2
            )
        if self.rank == 0 or not found:
            verdict = found[0] if found else find_stalled({self.rank: status}, silent=[0])
            os.write(2, f"\nno progress for {limit_s:g} s: {verdict}\n".encode())
        if store is not None:
            time.sleep(EXIT_S + self.all_ranks_s)

    def _exchange(self, store: Store, status: dict[str, Any], found: list[str]) -> None:
        """Adds rank 0's verdict to `found`; nothing if rank 0 does not answer."""
        keys = [f"hung/{rank}" for rank in range(self.world_size)]
        with suppress(RuntimeError):  # torch's DistStoreError: no answer
            store.set(keys[self.rank], json.dumps(status))
            store.set("hung", "")
            if self.rank:
                store.wait(["hung/verdict"], timedelta(seconds=VERDICT_S + 3 * self.all_ranks_s))
                found.append(store.get("hung/verdict").decode())
                return
            ends = time.monotonic() + ANSWER_S + 2 * self.all_ranks_s
            while time.monotonic() < ends and not store.check(
                keys
            ):  # `wait` that fails looks hosts up: seconds
                time.sleep(POLL_S / 2)
            silent = absent(store, keys)
            there = sorted({*range(self.world_size)} - {*silent})
            texts = store.multi_get([keys[rank] for rank in there])
            found.append(
                find_stalled(dict(zip(there, map(json.loads, texts), strict=True)), silent)
            )
            store.set("hung/verdict", found[0])


def absent(store: Store, keys: list[str]) -> list[int]:
    """Returns the indices of the keys that `store` does not have. Halves the list: a key costs log2
    of all queries."""
    if not keys or store.check(keys):
        return []
    if len(keys) == 1:
        return [0]
    half = len(keys) // 2
    return absent(store, keys[:half]) + [half + index for index in absent(store, keys[half:])]


def _start_thread(function: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


WATCHDOG = WatchdogThread()
