"""Warnings of the other ranks, told once by rank 0."""

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
    """Print "rank 3 and 62 more: …" for what other ranks warned of and rank 0 has not said already.

    Their number rides along with the metrics. Only where a rank has some do the ranks exchange them, at that log step;
    and once at the end of `validate`, `test` and `predict`, which have none. cluster/messages.py keeps them until then.
    """

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        MESSAGES.listen()  # also to a handler of the root logger, as a user's `logging.basicConfig` makes

    def before_log_step(self, trainer: Any, module: Any) -> None:
        module.metrics.put_of_rank("messages", MESSAGES.num_kept)

    def on_log_step(self, trainer: Any, module: Any, metrics: dict[str, float]) -> None:
        if any(module.metrics.of_ranks.pop("messages", ())):
            self._exchange(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "validate":
            self._exchange(trainer)

    def on_test_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._exchange(trainer)

    def on_predict_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._exchange(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        MESSAGES.flush()

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        MESSAGES.flush()

    @staticmethod
    def _exchange(trainer: Any) -> None:
        """Collective."""
        ranks = weights.from_all_ranks(MESSAGES.take())
        if trainer.is_global_zero and (lines := told_once(ranks, MESSAGES.told)):
            write_lines(trainer, "\n".join(lines), file=sys.stderr)


def told_once(ranks: list[list[str]], told: set[str]) -> list[str]:
    """A line for each text that is new; texts which differ in numbers alone, such as a device's, share one.

    Args:
        ranks: What each rank has kept since the last time.
        told: What was told already, in any rank's words; added to.
    """
    told |= {_in_any_ranks_words(text, 0) for text in told}  # rank 0's own
    lines: dict[str, tuple[str, list[int]]] = {}  # pattern -> a text, its ranks
    for rank, texts in enumerate(ranks):
        for text in texts:
            if _in_any_ranks_words(text, rank) not in told:
                who = lines.setdefault(re.sub(r"\d+", "#", text), (text, []))[1]
                who.extend([rank] if rank not in who else [])
    told |= {_in_any_ranks_words(text, rank) for rank, texts in enumerate(ranks) for text in texts}
    return [f"{_these(who)}: {text}" for text, who in lines.values()]


def _in_any_ranks_words(text: str, rank: int) -> str:
    """`text` of `rank`, with the rank's own number left open: "cuda:3" on rank 3 is "cuda:0" on rank 0."""
    return re.sub(rf"(?<!\d){rank}(?!\d)", "<rank>", text)


def _these(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")
