"""Prints the warnings of all ranks once, on rank 0."""

from __future__ import annotations

import re
import sys
from typing import Any

import lightning as L
from lightning.pytorch import Callback

from .. import weights
from ..cluster.messages import MESSAGES
from ..model.any_module import metrics_of
from .console import write_lines


class WarningsOfRanks(Callback):
    """Prints "rank 3 and 62 more: …" for warnings of other ranks that rank 0 has not printed.

    The number of warnings is sent with the metrics. If a rank has some, the ranks exchange them at that log step, and
    once at the end of `validate`, `test` and `predict`, which have no log steps. cluster/messages.py buffers them.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        MESSAGES.listen()  # again, for handlers that were added since

    def before_log_step(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        metrics_of(module).put_of_rank("messages", MESSAGES.num_buffered)

    def on_log_step(self, trainer: L.Trainer, module: L.LightningModule, metrics: dict[str, float]) -> None:
        if any(metrics_of(module).of_ranks.pop("messages", ())):
            self._exchange(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._exchange(trainer)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._exchange(trainer)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._exchange(trainer)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        MESSAGES.flush()

    on_exception = teardown

    @staticmethod
    def _exchange(trainer: L.Trainer) -> None:
        """Gathers the warnings and prints new ones. Collective."""
        ranks = weights.from_all_ranks(MESSAGES.drain())
        if trainer.is_global_zero and (lines := new_lines(ranks, MESSAGES.reported)):
            write_lines(trainer, "\n".join(lines), file=sys.stderr)


def new_lines(ranks: list[list[str]], reported: set[str]) -> list[str]:
    """Returns a line for each new text; texts that differ only in numbers count as equal.

    Args:
        ranks: Each rank's warnings since the last exchange.
        reported: The texts that were printed already; new ones are added.
    """
    known = {_pattern(text) for text in reported}
    new: dict[str, tuple[str, list[int]]] = {}  # pattern -> a text, its ranks
    for rank, texts in enumerate(ranks):
        for text in texts:
            reported.add(text)
            if _pattern(text) not in known:
                _, owners = new.setdefault(_pattern(text), (text, []))
                if rank not in owners:
                    owners.append(rank)
    lines = []
    for text, owners in new.values():
        more = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
        lines.append(f"rank {owners[0]}{more}: {text}")
    return lines


def _pattern(text: str) -> str:
    """Returns `text` without its numbers, such as a rank's or a device's."""
    return re.sub(r"\d+", "#", text)
