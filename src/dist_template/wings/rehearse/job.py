"""What workers.py sends to a rank (worker.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...project import Project

if TYPE_CHECKING:
    from lightning.pytorch import Callback


@dataclass
class Job:
    """One rank's work, sent to the worker by pickle."""

    argv: list[str]
    project: Project
    record: Path
    callbacks: Sequence[Callback] = ()
    prelude: Callable[[], None] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    timeout_s: float | None = 300.0
    idle_s: float = 0.0
