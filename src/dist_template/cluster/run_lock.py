"""A lock on a run's folder: one launch at a time writes into it.

`lock.json` names its holder: rank 0's process, and the launch. The holder renews the file every
BEAT_S seconds. `flock` is not used: not every network file system shares it between hosts. A launch
that finds the file compares the holder:

    its process is on this host   alive: refused; dead: taken over; both at once
    it belongs to the same launch taken over: torchrun and Slurm end it before a restart
    otherwise                     renewed within LEASE_S: refused; else taken over"""

import json
import os
import platform
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import psutil

from .. import foreign
from ..errors import Exit
from ..records import write_atomically
from .environment import machine
from .launch import Variable
from .watchdog import WATCHDOG

__all__ = ["RunLock", "is_alive", "this_process"]

FILE = "lock.json"
BEAT_S, LEASE_S, SETTLE_S = 5.0, 60.0, 0.3
Holder = Mapping[str, object]


class RunLock(AbstractContextManager):
    """The lock that this process holds, if any; `with` releases it at the end. `RUN_LOCK` is
    `fit`'s instance."""

    _path: Path | None = None
    _made_folder = False  # by `take`
    _released = threading.Event()

    def take(self, folder: Path) -> str | None:
        """Locks a run's folder; for rank 0. Returns why it is refused, or None."""
        self.release()
        path, claim = folder / FILE, this_process()
        if os.path.lexists(path) and not path.is_file():
            return f"{path} is not a file: move it away, and start again"
        self._made_folder = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        while read(path) != claim:
            with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
                json.dump(claim, file)
                break
            holder = read(path)
            if holder is None:  # released in the meantime
                continue
            why = refusal(path, holder, claim)
            if why:
                return why
            if read(path) == holder:  # else another launch was faster
                write_atomically(path, json.dumps(claim))
                # Of several launches that take it over at once, the last holds it.
                time.sleep(SETTLE_S)
        self._path, self._released = path, threading.Event()
        threading.Thread(target=renew, args=(path, claim, self._released), daemon=True).start()
        return None

    def __exit__(self, *_: object) -> None:
        self.release()

    def discard(self) -> None:
        """Deletes the folder of a run that was refused before it began, if `take` has made it:
        loggers have opened files in it, and it has no configuration and no checkpoint yet."""
        if self._path is None or not self._made_folder:
            return
        folder = self._path.parent
        if not any((folder / name).exists() for name in ("config.yaml", "checkpoints")):
            shutil.rmtree(folder, ignore_errors=True)

    def release(self) -> None:
        """Releases the lock, if this process holds it."""
        self._released.set()
        if self._path is not None and read(self._path) == this_process():
            self._path.unlink(missing_ok=True)
            with suppress(OSError):  # not empty
                self._path.parent.rmdir()
        self._path = None


RUN_LOCK = RunLock()


def this_process() -> Holder:
    """Returns what lock.json has if this process holds the lock."""
    process = psutil.Process()
    # An identifier of the launch that a restart or a requeue keeps, or "".
    launch = os.environ.get(Variable.LAUNCH)
    if not launch:
        job = os.environ.get("SLURM_JOB_ID")
        launch = f"slurm {job}.{os.environ.get('SLURM_STEP_ID')}" if job else ""
    return {
        "host": platform.node(),
        "machine": machine(),
        "pid": process.pid,
        "since": process.create_time(),
        "launch": launch,
    }


def read(path: Path) -> Holder | None:
    """Returns the holder; {} if the file is incomplete or damaged, None if there is no file."""
    try:
        holder = json.loads(foreign.text_of(path))
        return holder if {"pid", "since"} <= holder.keys() else {}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, RecursionError):  # also of a folder, or a FIFO
        return {}


def refusal(path: Path, holder: Holder, claim: Holder) -> str | None:
    """Returns why the holder keeps the lock, after at most LEASE_S, or None."""
    process = f"process {holder.get('pid')} on {holder.get('host')}"
    sentence = f"{path.parent} is in use by {process}: wait until it exits, or set another"
    sentence += f" {Variable.RUN_ID} or run.name"
    if holder.get("machine") == claim["machine"]:
        if holder["pid"] != claim["pid"] and is_alive(holder):
            return sentence
        return None
    if claim["launch"] and holder.get("launch") == claim["launch"]:
        return None
    print(
        f"{path} is held by {process}: waiting up to {LEASE_S:g} s to see whether it is alive",
        flush=True,
    )
    before, deadline = _modified(path), time.monotonic() + LEASE_S
    while time.monotonic() < deadline:
        now = _modified(path)
        if now is None:  # released
            return None
        if now != before:
            return sentence
        WATCHDOG.keep_alive()
        time.sleep(BEAT_S / 10)
    return None


def is_alive(holder: Mapping) -> bool:
    """Returns whether a holder's process on this machine runs; its values may be of any type."""
    with suppress(psutil.Error, LookupError, TypeError, ValueError, OverflowError):
        process = psutil.Process(holder["pid"])
        is_holder = abs(process.create_time() - holder["since"]) < 2
        return is_holder and process.status() != psutil.STATUS_ZOMBIE
    return False


def _modified(path: Path) -> int | None:
    """Returns when the file was renewed. Opening it bypasses caches of network file systems."""
    with suppress(FileNotFoundError), path.open() as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return None


def renew(path: Path, claim: Holder, released: threading.Event) -> None:
    """Renews the file until `released`; exits if another launch has taken the lock over."""
    while not released.wait(BEAT_S):
        with suppress(OSError):  # the file server does not answer: try again
            holder = read(path)
            if holder and holder != claim and not released.is_set():
                print(f"{path.parent} was taken over by another launch: this one exits", flush=True)
                os._exit(Exit.BAD_INPUT)
            os.utime(path)
