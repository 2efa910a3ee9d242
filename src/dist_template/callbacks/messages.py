"""Prints the warnings of all ranks once, on rank 0."""

from __future__ import annotations

import re
import sys
from typing import Any

import lightning as L
from lightning.pytorch import Callback

from .. import weights
from ..cluster.messages import MESSAGES
from .console import write_lines


class WarningsOfRanks(Callback):
    """Prints "rank 3 and 62 more: …" for warnings of other ranks that rank 0 has not printed.

    Ranks exchange them after each validation, also the one before training, and at the end. cluster/messages.py buffers
    them meanwhile.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        MESSAGES.listen()  # again, for handlers that were added since

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gathers the warnings and prints new ones. Collective."""
        ranks = weights.from_all_ranks(MESSAGES.drain())
        if trainer.is_global_zero and (lines := new_lines(ranks, MESSAGES.reported)):
            write_lines(trainer, "\n".join(lines), file=sys.stderr)

    on_train_end = on_test_end = on_predict_end = on_validation_end

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        MESSAGES.flush()

    on_exception = teardown


def new_lines(ranks: list[list[str]], reported: set[str]) -> list[str]:
    """Returns a line for each new text; texts that differ only in numbers count as equal.

    Args:
        ranks: Each rank's warnings since the last exchange.
        reported: The texts that were printed already; new ones are added.
    """
    known = {re.sub(r"\d+", "#", text) for text in reported}  # without a rank's or a device's number
    new: dict[str, tuple[str, list[int]]] = {}  # pattern -> a text, its ranks
    for rank, texts in enumerate(ranks):
        for text in dict.fromkeys(texts):
            reported.add(text)
            pattern = re.sub(r"\d+", "#", text)
            if pattern not in known:
                new.setdefault(pattern, (text, []))[1].append(rank)
    lines = []
    for text, owners in new.values():
        more = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
        lines.append(f"rank {owners[0]}{more}: {text}")
    return lines
