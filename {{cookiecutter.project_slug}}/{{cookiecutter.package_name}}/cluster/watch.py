"""A thread in each process that notices when training stands still, and says which rank did not arrive.

Training tells of its progress with `WATCH.beat()`, two writes of an attribute. When none comes for `limit_s` seconds,
on any rank, each rank prints the stacks of its threads and puts its place into the store of `meeting.py`; rank 0 says
which rank is behind the others; and all end with Exit.HUNG, on which a launcher starts them again. A rank that is
stopped, or whose node is gone, says nothing: that is how it is found, and on the same host it is killed, because a
launcher waits for a stopped process for half a minute.

faulthandler's own timer, a thread in C, stands behind this one, for code that never gives back Python's lock.
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
from collections.abc import Callable
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import Exit

START_TIMEOUT_S = 1800.0  # until a configuration has been read that says another
POLL_S = 0.1
ANSWER_S = 0.3  # rank 0 waits so long for the others' places
VERDICT_S = 0.6  # the others wait so long for rank 0's sentence: it may have noticed a poll later
FAREWELL_S = 0.1  # all stay so long, for the others to read it and for the disk; all in all, about a second

# What a rank is doing, by the innermost of its main thread's frames whose file ends so or whose function is called so.
PHASES = (
    ("loops/fetchers.py", "", "in its data loader"),
    ("torch/utils/data/dataloader.py", "", "in its data loader"),
    ("", "save_checkpoint", "saving a checkpoint"),
    ("", "load_checkpoint", "loading a checkpoint"),
    ("torch/autograd/graph.py", "_engine_run_backward", "backward"),
    ("", "training_step", "forward"),
    ("", "validation_step", "forward"),
    ("", "test_step", "forward"),
    ("", "predict_step", "forward"),
    ("trainer/call.py", "_call_callback_hooks", "in a callback"),
    ("", "backward", "backward"),
    ("", "optimizer_step", "optimizer"),
    ("", "batch_to_device", "taking a batch to its device"),
    ("", "init_process_group", "joining the process group"),
    ("", "configure_model", "building the model"),
    ("trainer/call.py", "_call_setup_hook", "in setup"),
    ("strategies/", "setup", "in the strategy's setup"),
    ("loops/", "advance", "between micro-batches"),
    ("<frozen importlib", "", "importing"),
)
# A process waits for the others when, before any code of other libraries or ours, one of these is in its stack.
WAITING = ("/torch/distributed/", "/torch/autograd/graph.py", "/deepspeed/comm/")


class Watch:
    """The progress of this process; `WATCH` is the one there is."""

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
        self.ends = False  # this process, in a moment

    def beat(self) -> None:
        """There was progress, of which every rank makes the same."""
        self.beats += 1
        self._last = time.monotonic()

    def alive(self) -> None:
        """This process works on what the others have no part in: nobody is compared by it."""
        self._last = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line about such work."""
        self.alive()
        print(text)

    def arm(self, limit_s: float, stacks: Path | None = None) -> None:
        """End this process when nothing has happened for `limit_s` seconds, from now on; 0 lets it be."""
        self.beat()
        self.limit_s, self.stacks = limit_s, stacks
        self._back_up()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def disarm(self) -> None:
        """Nothing is watched any more, and no rank is known."""
        with self._lock:
            self.limit_s = 0.0
            faulthandler.cancel_dump_traceback_later()
        self.introduce(None, 0, 1, {})

    def introduce(self, store: Any, rank: int, world_size: int, peers: dict[int, int]) -> None:
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
            limit_s, idle_s = self.limit_s, time.monotonic() - self._last
            if limit_s and (idle_s >= limit_s or (idle_s >= limit_s / 2 and self._is_called())):
                try:
                    self._tell(limit_s)
                finally:
                    os._exit(Exit.HUNG)

    def _back_up(self) -> None:
        """Wind up faulthandler's timer again, where there was progress since."""
        with self._lock:
            now = (self._last, self.limit_s)
            if self.limit_s and self._backed_up != now:
                self._backed_up = now
                rest_s = self._last + self.limit_s + 1 - time.monotonic()
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
        self.ends = True
        faulthandler.cancel_dump_traceback_later()
        own = self._word()
        head = f"\nno progress for {limit_s:g} s; rank {self.rank}: {own['place']}, {own['line']}; its stacks:\n"
        os.write(2, head.encode())
        faulthandler.dump_traceback(2, all_threads=True)
        writes = threading.Thread(target=self._write, args=(f"rank{self.rank}.txt", head, True), daemon=True)
        writes.start()  # a file server that hangs, which may be the reason, must not keep us
        verdict = self._confer(own) if self._store is not None else _verdict({0: own}, 1)
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

    def _word(self) -> dict[str, Any]:
        """Where this rank is."""
        frames = _frames(sys._current_frames().get(threading.main_thread().ident or 0))
        phase = next((words for frame in frames for words in [_phase(frame)] if words), "elsewhere")
        files = [frame.f_code.co_filename for frame in frames]
        line = f"{'/'.join(Path(files[0]).parts[-3:])}:{frames[0].f_lineno}" if files else "?"
        inner = takewhile(lambda file: "/torch/" in file or "/deepspeed/" in file, files)
        waits = any(part in file for file in inner for part in WAITING)
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
        asks = threading.Thread(target=lambda: found.append(self._exchange(own)), daemon=True)
        asks.start()
        asks.join(VERDICT_S + POLL_S / 2)
        return found[0] if found else _verdict({self.rank: own}, 1, silent=[0])

    def _exchange(self, own: dict[str, Any]) -> dict[str, Any]:
        store, ranks = self._store, range(self.world_size)
        store.set(f"hung/{self.rank}", json.dumps(own))
        store.set("hung", "")
        if self.rank:
            store.wait(["hung/verdict"], timedelta(seconds=VERDICT_S))
            return json.loads(store.get("hung/verdict"))
        with contextlib.suppress(RuntimeError):  # torch's DistStoreError: not all have come
            store.wait([f"hung/{rank}" for rank in ranks], timedelta(seconds=ANSWER_S))
        here = [rank for rank in ranks if store.check([f"hung/{rank}"])]
        words = {rank: json.loads(store.get(f"hung/{rank}")) for rank in here}
        verdict = _verdict(words, self.world_size, [rank for rank in ranks if rank not in words])
        store.set("hung/verdict", json.dumps(verdict))
        return verdict


def _verdict(words: dict[int, dict[str, Any]], world_size: int, silent: list[int] | None = None) -> dict[str, Any]:
    """Which rank did not arrive: one that is silent; else one with the least progress that waits for nobody."""
    least = min(word["beats"] for word in words.values())
    behind = [rank for rank, word in words.items() if word["beats"] == least]
    behind = [rank for rank in behind if not words[rank]["waits"]] or behind
    if silent:
        why = "its process is stopped or its node is gone" if len(silent) == 1 else "they are stopped or gone"
        parts, rest = [f"{_ranks(silent)} did not arrive and says nothing: {why}"], list(words)
    elif len(words) == 1:
        (word,) = words.values()
        parts, rest = [f"{word['place']}, {word['line']}"], []
    elif len(behind) == len(words):
        places = [f"{_ranks([rank])}: {word['place']}, {word['line']}" for rank, word in words.items()]
        parts = ["no rank is behind the others", *places]
        rest = []
    else:
        parts = [f"{_ranks([r])} did not arrive: {words[r]['place']}, {words[r]['line']}" for r in behind]
        rest = [rank for rank in words if rank not in behind]
    for place in dict.fromkeys(words[rank]["place"] for rank in rest):
        there = [rank for rank in rest if words[rank]["place"] == place]
        parts.append(f"{_ranks(there)} wait{'s' * (len(there) == 1)} for it in {place.removeprefix('in ')}")
    return {"sentence": "; ".join(parts), "silent": silent or [], "by": min(words)}


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _phase(frame: FrameType) -> str | None:
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    return next((words for part, name, words in PHASES if part in file and (not name or name == function)), None)


WATCH = Watch()
