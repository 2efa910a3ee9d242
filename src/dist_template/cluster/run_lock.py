"""A lock on a run's folder: one launch at a time writes into it.

`lock.json` names its holder: rank 0's host and process, and the launch. A thread of the holder renews the file every
BEAT_S seconds. It is no `flock`, which not every network file system shares between hosts. A start that finds the file:

    the holder's process is on this host      alive: refused; dead: taken over, both at once. Alive
                                              without its launcher, it saves and ends: waited for
    the holder is of this start's own launch  taken over at once: torchrun and Slurm have ended it before a restart
    else                                      renewed within LEASE_S: refused; not renewed: taken over

Clocks are not compared: a start waits until it has seen the file change.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from ..errors import Exit
from .launch import LAUNCH, RUN_ID
from .watchdog import WATCHDOG

FILE = "lock.json"
BEAT_S, LEASE_S, SETTLE_S = 5.0, 60.0, 0.3
PARENT = os.getppid()


class RunLock:
    """The lock that this process holds, if any; `RUN_LOCK` is the one there is."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._released = threading.Event()

    def take(self, folder: Path) -> str | None:
        """Take the lock of a run's folder. For rank 0.

        Returns:
            Why it is refused; None where this process holds it now.
        """
        self.release()
        path, own = folder / FILE, _own()
        folder.mkdir(parents=True, exist_ok=True)
        while (holder := _create(path, own)) is not None:
            if why := _refusal(path, holder, own):
                return why
            temporary = path.with_name(f".{FILE}.{os.getpid()}")
            temporary.write_text(json.dumps(own), encoding="utf-8")
            if _read(path) != holder:  # another start was quicker
                continue
            os.replace(temporary, path)
            time.sleep(SETTLE_S)  # of several that take it over at the same moment, the last one has it
            if _read(path) == own:
                break
        self._path, self._released = path, threading.Event()
        threading.Thread(target=_renew, args=(path, own, self._released), name="run lock", daemon=True).start()
        return None

    def __enter__(self) -> None:
        """Nothing is taken yet; what is taken meanwhile is freed in the end."""

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Free the lock; without effect where this process holds none."""
        self._released.set()
        if self._path is not None and _read(self._path) == _own():
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty
                self._path.parent.rmdir()
        self._path = None


RUN_LOCK = RunLock()


def launch() -> str:
    """A name that a restart by the launcher or a requeue by the scheduler keeps; "" where nothing gives one."""
    job = os.environ.get("SLURM_JOB_ID")
    return os.environ.get(LAUNCH) or (f"slurm {job}.{os.environ.get('SLURM_STEP_ID')}" if job else "")


def _own() -> dict[str, Any]:
    process = psutil.Process()
    return {
        "host": platform.node(),
        "machine": _machine(),
        "pid": process.pid,
        "since": process.create_time(),
        "parent": PARENT,
        "launch": launch(),
    }


def _machine() -> str:
    """Where a process number means something: this boot of this machine, and the container."""
    known = [platform.node()]
    with contextlib.suppress(OSError):  # no Linux
        known += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(known)


def _create(path: Path, own: dict[str, Any]) -> dict[str, Any] | None:
    """Create the file, which only one process can; where it exists, its holder."""
    while True:
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(own, file)
            return None
        except FileExistsError:
            if (holder := _read(path)) is not None:
                return holder


def _read(path: Path) -> dict[str, Any] | None:
    """The holder; {} where the file was not written to its end, None where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}


def _refusal(path: Path, holder: dict[str, Any], own: dict[str, Any]) -> str | None:
    who = f"process {holder.get('pid')} on {holder.get('host')}"
    sentence = f"{path.parent} is in use by {who}: wait for its end, or set another {RUN_ID} or run.name"
    if holder.get("machine") == own["machine"]:
        ends = time.monotonic() + LEASE_S
        while holder["pid"] != own["pid"] and (parent := _living_parent(holder)) is not None:
            if parent == holder.get("parent") or time.monotonic() > ends:
                return sentence
            WATCHDOG.keep_alive()  # its launcher is gone: it saves and ends
            time.sleep(BEAT_S / 10)
        return None
    if own["launch"] and holder.get("launch") == own["launch"]:
        return None
    print(f"{path} names {who}: waiting {LEASE_S:g} s at most for a sign of life", flush=True)
    before, ends = _stamp(path), time.monotonic() + LEASE_S
    while time.monotonic() < ends and (now := _stamp(path)) is not None:
        if now != before:
            return sentence
        WATCHDOG.keep_alive()
        time.sleep(BEAT_S / 10)
    return None


def _living_parent(holder: dict[str, Any]) -> int | None:
    """The parent of the holder's process; None where that has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(holder["pid"])
        if process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - holder["since"]) < 2:
            return process.ppid()
    return None


def _stamp(path: Path) -> int | None:
    """When the file was renewed. A network file system asks its server when a file is opened, not for every stat."""
    try:
        with path.open() as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _renew(path: Path, own: dict[str, Any], released: threading.Event) -> None:
    while not released.wait(BEAT_S):
        with contextlib.suppress(OSError):  # a file server that is away: the next renewal may reach it
            holder = _read(path)
            if holder and holder != own and not released.is_set():
                print(f"{path.parent} was taken over by another launch: this one ends and writes no more", flush=True)
                os._exit(Exit.BAD_INPUT)
            os.utime(path)
