"""The lock on a run in a store: one launch at a time uploads to it.

Two launches with disks of their own do not see each other's lock.json (cluster/run_lock.py). They
would both train, and the store would have files of both. `.lock` in the run's folder of the store
names its holder: rank 0's process, the launch, a token and a count, which grows every BEAT_S
seconds. A launch that finds it compares the holder:

    its process is on this host   alive: refused; dead: taken over; both at once
    it belongs to the same launch counted within two beats: refused; else taken over
    otherwise                     counted within LEASE_S: refused; else taken over

Clocks of hosts are not compared. S3 and others can write an object only if there is none; for
stores that cannot, and after taking over, the last of several writers holds the lock, which each
reads back after SETTLE_S."""

import json
import os
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...cluster import run_lock
from ...cluster.launch import Variable
from ...cluster.watchdog import WATCHDOG
from ...errors import Exit, InputError
from .remote import Remote

FILE = ".lock"  # hidden: neither uploads nor copies of a run take it
BEAT_S, LEASE_S, SETTLE_S = 15.0, 90.0, 1.0
Holder = dict[str, Any]


class StoreLock:
    """The lock of `run`, a run's folder in a store; for rank 0."""

    def __init__(self, run: Remote) -> None:
        self._run, self._object = run, run / FILE
        token = {"token": secrets.token_hex(8), "count": 0, "time": time.time()}
        self.claim: Holder = {**run_lock.this_process(), **token}
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> str | None:
        """Takes the lock; returns why it is refused, or None. Raises InputError of the store."""
        while True:
            holder = self._holder()
            if holder is None:
                self._create()
            elif holder.get("token") == self.claim["token"]:
                break
            else:
                why = self._refusal(holder)
                if why:
                    return why
                if self._holder() == holder:  # else another launch was faster
                    self._object.write(self._content())
            # Of several launches that write at once, the last holds the lock: read it back.
            time.sleep(SETTLE_S)
        self._object.until = 0.0  # training does not wait for a store that is down
        self._thread = threading.Thread(target=self._renew, daemon=True, name="store lock")
        self._thread.start()
        return None

    def is_held(self) -> bool:
        """Returns whether no other launch has taken the lock over."""
        holder = self._holder()
        return holder is None or holder.get("token") == self.claim["token"]

    def release(self) -> None:
        """Deletes the lock if this process holds it."""
        if not self._released.is_set() and self._thread is not None:
            self._released.set()
            self._thread.join(10.0)  # it may wait for the store
            with suppress(InputError):  # the store is down: the lease ends by itself
                holder = self._holder()
                if holder and holder.get("token") == self.claim["token"]:
                    self._object.remove()

    # ---- the object --------------------------------------------------------------------------

    def _content(self) -> bytes:
        return json.dumps(self.claim).encode()

    def _holder(self) -> Holder | None:
        """Returns the holder; {} if the object is damaged, None if there is none."""
        content = self._object.read()
        if not content:
            return None
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _is_this_process(self, holder: Holder) -> bool:
        return all(holder.get(key) == self.claim[key] for key in ("machine", "pid", "since"))

    def _create(self) -> None:
        """Writes the lock if there is none. A store that cannot do so raises errors of any kind, as
        does one with an object: it is written where there is none afterwards either."""
        try:
            self._object.write(self._content(), is_new=True)
        except Exception:
            if self._holder() is None:
                self._object.write(self._content())

    def _refusal(self, holder: Holder) -> str | None:
        """Returns why the holder keeps the lock, after at most LEASE_S, or None."""
        address = self._run.address
        process = f"process {holder.get('pid')} on {holder.get('host')}"
        sentence = (
            f"{address} is in use by {process}: wait until it exits or end it there"
            f" (`launch stop`), or set another {Variable.RUN_ID} or run.name; a launch that has"
            f" lost its machine loses the run {LEASE_S:g} s later"
        )
        if holder.get("machine") == self.claim["machine"]:
            if self._is_this_process(holder):  # left by an earlier training
                return None
            return sentence if run_lock.is_alive(holder) else None
        is_of_this_launch = self.claim["launch"] and holder.get("launch") == self.claim["launch"]
        wait_s = 2 * BEAT_S if is_of_this_launch else LEASE_S
        line = f"store: {address} is locked by {process}: waiting up to {wait_s:g} s to see whether"
        print(f"{line} it is alive", flush=True)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            WATCHDOG.keep_alive()
            time.sleep(BEAT_S / 5)
            now = self._holder()
            if now != holder:
                # It was released, or counts.
                return sentence if now else None
        return None

    def _renew(self) -> None:
        """Counts until `release`; exits if another launch has taken the lock over."""
        while not self._released.wait(BEAT_S):
            try:
                if not self.is_held():
                    holder = self._holder()
                    if holder and self._is_this_process(holder):
                        return  # a later training of this process has taken it over
                    text = f"store: {self._run.address} was taken over by another launch: this one"
                    print(f"{text} exits", flush=True)
                    os._exit(Exit.BAD_INPUT)
                self.claim |= {"count": self.claim["count"] + 1, "time": time.time()}
                self._object.write(self._content())
            except InputError:  # it does not answer: uploads report it
                continue


LOCKS: dict[Path, StoreLock] = {}  # that this process holds, by the runs' folders
