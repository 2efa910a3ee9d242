"""Streams and events of the fake device: everything has been computed, and a wait is counted."""

import threading
import time
from typing import Any, Self

import fake_device  # ty: ignore[import-not-found]
import torch

from .events import EVENTS


def index_of(device: Any = None) -> int:
    """Returns the index of `device`; None: the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return fake_device.get_device() if index is None else index


def wait(kind: str, operation: str, detail: str = "") -> None:
    """Finishes pending copies, as each wait of the host does."""
    fake_device.flush()
    EVENTS.record(kind, operation, detail)


class Event:
    """torch.cuda.Event. Counts those that exist."""

    alive = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at_s = 0.0
        Event.alive += 1

    def __del__(self) -> None:
        Event.alive -= 1

    def record(self, stream: Any = None) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        fake_device.flush()
        return True

    def synchronize(self) -> None:
        wait("EVENT_WAIT", "Event.synchronize")

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end: Any) -> float:
        return (end._at_s - self._at_s) * 1e3


class Stream:
    """torch.cuda.Stream."""

    stream_id = cuda_stream = priority = 0
    device_type = 1

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device_index = index_of(device)
        self.device = torch.device("cuda", self.device_index)

    def synchronize(self) -> None:
        wait("SYNC", "Stream.synchronize", f"{self.device} in {threading.current_thread().name}")

    def wait_stream(self, stream: Any) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        fake_device.flush()
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.device == self.device

    def __hash__(self) -> int:
        return hash(self.device)


class device:
    """torch.cuda.device, the context."""

    def __init__(self, given: Any) -> None:
        self._index = -1 if given is None else index_of(given)

    def __enter__(self) -> None:
        self._before = fake_device.get_device()
        if self._index >= 0:
            fake_device.set_device(self._index)

    def __exit__(self, *_: Any) -> None:
        fake_device.set_device(self._before)
