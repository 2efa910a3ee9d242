"""Prints the warnings of all ranks once, on rank 0."""

from __future__ import annotations

import re
import sys
from typing import Any

import lightning as L
from lightning.pytorch import Callback

from .. import weights
from ..cluster.messages import MESSAGES
from .console import console_of


class WarningsOfRanks(Callback):
    """Prints "rank 3: …" for warnings of other ranks that no lower rank has; equal ones once.

    Ranks exchange them after each validation, also the one before training, and at the end. cluster/messages.py buffers
    them meanwhile.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        MESSAGES.listen()  # again, for handlers that were added since

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gathers the warnings and prints new ones. Collective."""
        ranks = weights.from_all_ranks(MESSAGES.drain())
        if trainer.is_global_zero and (lines := new_lines(ranks, MESSAGES.reported)):
            console = console_of(trainer)
            (console.write if console else print)("\n".join(lines), file=sys.stderr)

    on_train_end = on_test_end = on_predict_end = on_validation_end

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        MESSAGES.flush()

    on_exception = teardown


def new_lines(ranks: list[list[str]], reported: set[str]) -> list[str]:
    """Returns a line for each text of `ranks` that is not in `reported`, and adds it there. Texts that differ only in
    numbers count as equal."""
    known = {re.sub(r"\d+", "#", text) for text in reported}  # without a rank's or a device's number
    lines = []
    for rank, texts in enumerate(ranks):
        for text in texts:
            reported.add(text)
            if (pattern := re.sub(r"\d+", "#", text)) not in known:
                known.add(pattern)
                lines.append(f"rank {rank}: {text}")
    return lines
