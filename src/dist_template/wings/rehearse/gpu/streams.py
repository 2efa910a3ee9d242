"""torch.cuda's streams and events: torch's own for any device, which ask the fake device's guard."""

from typing import Any, Self

import torch


class Event(torch.Event):
    """torch.cuda.Event."""

    def __new__(cls, enable_timing: bool = False, *_: Any, **__: Any) -> Self:
        return super().__new__(cls, "cuda", enable_timing=enable_timing)


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    priority = 0

    def __new__(cls, device: Any = None, priority: int = 0, **place: int) -> Self:
        if place:  # stream_id, device_index and device_type
            return super().__new__(cls, **place)
        index = torch.cuda._utils._get_device_index(device, optional=True)
        return super().__new__(cls, device=torch.device("cuda", index))

    @property
    def cuda_stream(self) -> int:
        """The number of the stream, in place of a pointer."""
        return self.stream_id

    def record_event(self, event: Event | None = None) -> Event:
        """Records an event, a new one without `event`, and returns it."""
        event = event or Event()
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        """Returns False: there are no graphs."""
        return False
