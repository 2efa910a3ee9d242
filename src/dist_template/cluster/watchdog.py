"""Watchdog thread: detects a hang, reports the stalled rank, and ends all ranks with Exit.HUNG.

Training reports progress with `WATCHDOG.beat()`, which sets two attributes. When a rank makes none for `limit_s`
seconds, each rank prints the stacks of its threads and publishes its status in the store of rendezvous.py; rank 0
prints which rank is behind. A rank that does not answer is stopped or its node is lost: if it is on the same host it is
killed, because a launcher waits half a minute for a stopped process.

faulthandler's own timer, a thread in C, is the fallback for code that never releases the GIL.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..errors import Exit
from .hang import find_stalled, locate
from .messages import MESSAGES

START_TIMEOUT_S = 1800.0  # until a configuration has been read that says another
POLL_S = 0.1
BACK_UP_S = 0.5  # between two windings of faulthandler's timer: each starts a thread
ANSWER_S = 0.3  # rank 0 waits so long for the others' places
VERDICT_S = 0.6  # the others wait so long for rank 0's sentence: it may have noticed a poll later
FAREWELL_S = 0.1  # all stay so long, for the others to read it and for the disk; all in all, about a second


class WatchdogThread:
    """The progress of this process; `WATCHDOG` is the one there is."""

    def __init__(self) -> None:
        self.beats = 0
        self.limit_s = 0.0  # 0: off
        self.stacks: Path | None = None  # a folder, where it is known already
        self.position: Callable[[str], str] = lambda phase: f"start-up, {phase}"
        self.rank, self.world_size = 0, 1
        self._store: Any = None
        self._peers: dict[int, int] = {}
        self._last = time.monotonic()
        self._backed_up: Any = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._asks: threading.Thread | None = None
        self._called = False  # by another rank
        self.is_exiting = False  # this process, in a moment

    def beat(self) -> None:
        """There was progress, of which every rank makes the same."""
        self.beats += 1
        self._last = time.monotonic()

    def keep_alive(self) -> None:
        """This process works on what the others have no part in: nobody is compared by it."""
        self._last = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._last

    def report(self, text: str) -> None:
        """Print a line about such work."""
        self.keep_alive()
        print(text)

    def start(self, limit_s: float, stacks: Path | None = None) -> None:
        """End this process when nothing has happened for `limit_s` seconds, from now on; 0 lets it be."""
        self.beat()
        self.limit_s, self.stacks = limit_s, stacks
        self._back_up()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Nothing is watched any more, and no rank is known."""
        with self._lock:
            self.limit_s, self._backed_up = 0.0, None
            faulthandler.cancel_dump_traceback_later()
        self.connect(None, 0, 1, {})

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Not watched meanwhile, for what has a limit of its own."""
        limit_s = self.limit_s
        with self._lock:
            self.limit_s, self._backed_up = 0.0, None
            faulthandler.cancel_dump_traceback_later()
        try:
            yield
        finally:
            self.beat()
            self.limit_s = limit_s

    def connect(self, store: Any, rank: int, world_size: int, peers: dict[int, int]) -> None:
        """The other ranks can be asked from now on: all have got as far as this one, and are compared from here.

        Args:
            store: Which all of them share.
            rank: Of this process.
            world_size: Number of ranks.
            peers: Of the ranks on this host, rank -> a file descriptor of its process.
        """
        for descriptor in self._peers.values():
            os.close(descriptor)
        self._store, self.rank, self.world_size, self._peers = store, rank, world_size, peers
        self.beats = 0

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_S)
            self._back_up()
            limit_s, idle_s = self.limit_s, self.idle_s
            if limit_s and (idle_s >= limit_s or (idle_s >= limit_s / 2 and self._is_called())):
                try:
                    self._tell(limit_s)
                finally:
                    os._exit(Exit.HUNG)

    def _back_up(self) -> None:
        """Wind up faulthandler's timer again, where there was progress since."""
        with self._lock:
            last, limit_s = self._backed_up or (-BACK_UP_S, 0.0)
            if self.limit_s and (self.limit_s != limit_s or self._last - last >= BACK_UP_S):
                self._backed_up = (self._last, self.limit_s)
                rest_s = self._last + self.limit_s + 1 + BACK_UP_S - time.monotonic()
                faulthandler.dump_traceback_later(max(0.1, rest_s), exit=True, file=2)

    def _is_called(self) -> bool:
        """Whether another rank has noticed. Nobody asks while there is progress."""
        if self._store is not None and (self._asks is None or not self._asks.is_alive()):
            self._asks = threading.Thread(target=self._ask, daemon=True)  # the store's host may be the one that hangs
            self._asks.start()
            self._asks.join(POLL_S / 2)
        return self._called

    def _ask(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._called = self._store.check(["hung"])

    def _tell(self, limit_s: float) -> None:
        self.is_exiting = True
        MESSAGES.flush()
        faulthandler.cancel_dump_traceback_later()
        own = self.status()
        head = f"\nno progress for {limit_s:g} s; rank {self.rank}: {own['place']}, {own['line']}; its stacks:\n"
        os.write(2, head.encode())
        faulthandler.dump_traceback(2, all_threads=True)
        writes = threading.Thread(target=self._write, args=(f"rank{self.rank}.txt", head, True), daemon=True)
        writes.start()  # a file server that hangs, which may be the reason, must not keep us
        verdict = self._confer(own) if self._store is not None else find_stalled({self.rank: own}, [])
        sentence = f"no progress for {limit_s:g} s: {verdict['sentence']}"
        if verdict["by"] == self.rank:
            os.write(2, f"\n{sentence}\n".encode())
            tells = threading.Thread(target=self._write, args=("summary.txt", sentence + "\n", False), daemon=True)
            tells.start()
            tells.join(FAREWELL_S)
        writes.join(FAREWELL_S)
        if self._store is not None:
            time.sleep(FAREWELL_S)
        for rank in set(verdict["silent"]) & self._peers.keys():
            with contextlib.suppress(OSError):  # it is over
                signal.pidfd_send_signal(self._peers[rank], signal.SIGKILL)

    def status(self) -> dict[str, Any]:
        """Where this rank is, for the others to read."""
        phase, line, waits = locate(sys._current_frames().get(threading.main_thread().ident or 0))
        try:
            place = self.position(phase)
        except Exception:  # whatever is only half there: the stacks are worth more
            place = phase
        return {"beats": self.beats, "place": place, "line": line, "waits": waits}

    def _write(self, name: str, text: str, with_stacks: bool) -> None:
        if self.stacks is None:
            return
        with contextlib.suppress(OSError):
            self.stacks.mkdir(parents=True, exist_ok=True)
            with (self.stacks / name).open("a", encoding="utf-8") as file:
                file.write(time.strftime("%Y-%m-%dT%H:%M:%S%z ") + text.lstrip())
                file.flush()
                if with_stacks:
                    faulthandler.dump_traceback(file, all_threads=True)

    def _confer(self, own: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's verdict; or this rank's, when rank 0 is silent."""
        found: list[dict[str, Any]] = []
        asks = threading.Thread(target=self._exchange, args=(own, found), daemon=True)
        asks.start()
        asks.join(VERDICT_S + POLL_S / 2)
        return found[0] if found else find_stalled({self.rank: own}, silent=[0])

    def _exchange(self, own: dict[str, Any], found: list[dict[str, Any]]) -> None:
        store, keys = self._store, [f"hung/{rank}" for rank in range(self.world_size)]
        with contextlib.suppress(RuntimeError):  # torch's DistStoreError: rank 0, or the store, does not answer
            store.set(keys[self.rank], json.dumps(own))
            store.set("hung", "")
            if self.rank:
                store.wait(["hung/verdict"], timedelta(seconds=VERDICT_S))
                found.append(json.loads(store.get("hung/verdict")))
                return
            with contextlib.suppress(RuntimeError):  # the same: not all have come
                store.wait(keys, timedelta(seconds=ANSWER_S))
            silent = [] if store.check(keys) else [rank for rank, key in enumerate(keys) if not store.check([key])]
            here = [rank for rank in range(self.world_size) if rank not in silent]
            words = zip(here, store.multi_get([keys[rank] for rank in here]), strict=True)
            found.append(find_stalled({rank: json.loads(word) for rank, word in words}, silent))
            store.set("hung/verdict", json.dumps(found[0]))


WATCHDOG = WatchdogThread()
