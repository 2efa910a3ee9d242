"""Watchdog thread: detects a hang, reports the stalled rank, and ends all ranks with Exit.HUNG.

Training reports progress with `WATCHDOG.beat()`, which sets two attributes. When a rank makes none
for `limit_s` seconds, each rank prints the stacks of its threads and publishes its status in the
store of rendezvous.py; rank 0 prints which rank is behind.

A rank that has finished waits for the others (`finish`), so that a hang of one of them at the very
end is detected too, also of rank 0."""

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
ALIVE = 4  # times within the limit a rank with progress says so to those that have finished


class WatchdogThread:
    """Watches the progress of this process. `WATCHDOG` is the only instance."""

    def __init__(self) -> None:
        self.beats = 0
        self.limit_s = 0.0  # 0: off
        self.position: Callable[[str], str] = lambda phase: f"start-up, {phase}"
        self.rank, self.world_size = 0, 1
        self.batches = 0  # of training, begun in this epoch
        self.has_ended = False  # the last of them is done: this rank has no more data
        self.is_exiting = False
        self.is_finished = False  # this rank has done its work, and waits for the others'
        self._store: Store | None = None
        self._last = time.monotonic()
        self._thread: threading.Thread | None = None
        self._query: threading.Thread | None = None
        self._is_called = False  # by a rank that has detected the hang
        self._has_left = False  # the other ranks know that this one has finished or failed
        # When progress was published last, and when that progress was made.
        self._published = (0.0, 0.0)
        self._queried = 0.0  # when the store was asked last
        self.all_ranks_s = 0.0  # the time in which all ranks can query the store once

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
        """Turns the watchdog off and forgets the other ranks; those that have finished do not wait
        for this one."""
        if self.limit_s and self._store is not None:
            _start_thread(self._leave).join(EXIT_S)  # the store's host may be gone
        self.limit_s = 0.0
        self.connect(None, 0, 1)

    def finish(self) -> None:
        """Waits until all ranks have finished or failed; the watchdog stays on. Returns at once
        where it is off."""
        self.beat()
        store = self._store
        if store is None or not self.limit_s:
            return
        self.is_finished = True
        progress = None
        with suppress(RuntimeError):  # the store's host has exited
            store.set(f"finished/{self.rank}", "")
            self._leave()
            while not store.check(["left"]):
                time.sleep(POLL_S / 2 + 2 * self.all_ranks_s)
                before, progress = progress, store.add("progress", 0)
                if progress != before:
                    self.keep_alive()
            # Rank 0 hosts the store: torch prints C++ stacks where it is gone during a query.
            ends = time.monotonic() + VERDICT_S + 2 * self.all_ranks_s
            num_seen = store.add("num_seen", 1)
            while self.rank == 0 and num_seen < self.world_size and time.monotonic() < ends:
                time.sleep(POLL_S / 2)
                num_seen = store.add("num_seen", 0)

    def _leave(self) -> None:
        """Tells the others that this rank does not need them any more."""
        store = self._store
        if store is None or self._has_left:
            return
        self._has_left = True
        with suppress(RuntimeError):
            if store.add("num_left", 1) == self.world_size:
                store.set("left", "")

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
        self.is_finished = self._has_left = self._is_called = False

    def status(self) -> dict[str, Any]:
        """Returns where this rank is, for `find_stalled`."""
        phase, line, waits = locate(sys._current_frames().get(threading.main_thread().ident or 0))
        place = phase
        with suppress(Exception):  # the trainer may be half built; the stacks matter more
            place = self.position(phase)
        found = {"beats": self.beats, "place": place, "line": line, "waits": waits}
        return found | {
            "is_finished": self.is_finished,
            "batches": self.batches,
            "has_ended": self.has_ended,
        }

    # ---- the thread ------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_S)
            limit_s, idle_s = self.limit_s, time.monotonic() - self._last
            self._publish(limit_s)
            if not limit_s:
                continue
            # Another rank's verdict counts only for a rank that is idle itself.
            if idle_s >= limit_s or (idle_s >= limit_s / 2 and self._check_call()):
                try:
                    self._report_hang(limit_s)
                finally:
                    record_exit(Exit.HUNG)
                    os._exit(Exit.HUNG)

    def _check_call(self) -> bool:
        """Returns whether another rank has detected the hang."""
        store = self._store
        if store is not None and time.monotonic() - self._queried > self.all_ranks_s:

            def ask() -> None:
                self._is_called = store.check(["hung"])

            if self._ask(ask):
                self._queried = time.monotonic()
        return self._is_called

    def _publish(self, limit_s: float) -> None:
        """Counts, a few times within the limit, that this rank has made progress of any kind: one
        that has finished may wait for it longer than the limit."""
        store, now, last = self._store, time.monotonic(), self._last
        published_s, of = self._published
        if store is None or self.is_finished or not limit_s or last == of:
            return
        if now - published_s >= limit_s / ALIVE and self._ask(lambda: store.add("progress", 1)):
            self._published = now, last

    def _ask(self, query: Callable[[], object]) -> bool:
        """Queries the store in a thread, because the store's host may hang itself. Returns whether
        it could start: not if the query before has no answer yet."""
        if self._query is not None and self._query.is_alive():
            return False

        def ask() -> None:
            with suppress(RuntimeError):
                query()

        self._query = _start_thread(ask)
        self._query.join(POLL_S / 2)
        return True

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
        store = self._store
        if store is None:
            found = [find_stalled({self.rank: status}, [])]
        else:
            exchange = _start_thread(self._exchange, store, status, found)
            exchange.join(VERDICT_S + 3 * self.all_ranks_s + POLL_S / 2)
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
            # A `wait` of the store that fails looks hosts up, which takes seconds.
            while time.monotonic() < ends and not store.check(keys):
                time.sleep(POLL_S / 2)
            missing = absent(store, keys)
            there = sorted(set(range(self.world_size)) - set(missing))
            texts = store.multi_get([keys[rank] for rank in there])
            statuses = dict(zip(there, map(json.loads, texts), strict=True))
            finished = [rank for rank in missing if store.check([f"finished/{rank}"])]
            silent = sorted(set(missing) - set(finished))
            found.append(find_stalled(statuses, silent, finished))
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
