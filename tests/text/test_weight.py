"""How many tokens count in a global batch: known on all ranks before the step begins, and nobody waits for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_template.text import weight
from dist_template.text.order import WINDOW, LazyLoader
from dist_template.text.weight import TokensOfRanks, Window

COUNTED = [3, 8, 1, 2, 5]  # labels that count, of each batch
CPU = torch.device("cpu")


def windows(size: int) -> list[Window]:
    rows = [{"labels": torch.from_numpy(np.where(np.arange(8) < counted, 7, -100))} for counted in COUNTED]
    batches = list(LazyLoader(rows, size, batch_size=None))
    assert [WINDOW in batch for batch in batches] == [number % size == 0 for number in range(len(COUNTED))]
    return [batch[WINDOW] for batch in batches if WINDOW in batch]


def test_a_window_tells_of_the_next() -> None:
    assert windows(2) == [Window(11, 3, True), Window(3, 5, False), Window(5, None, False)]


class TwoRanks:
    """In place of torch.distributed: the other rank has 10 tokens more, and what is sent arrives when waited for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return 2

    def all_reduce(self, tensor: Tensor, async_op: bool) -> Any:
        assert async_op
        name = f"{tensor.item():.0f}"
        self.calls.append(f"begin {name}")
        return type("Work", (), {"wait": lambda _: (self.calls.append(f"wait {name}"), tensor.add_(tensor + 10))})()


def test_the_sum_is_begun_a_step_early(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = TwoRanks()
    monkeypatch.setattr(weight, "dist", ranks)
    tokens = TokensOfRanks()
    assert [tokens.mean(window, CPU).item() for window in windows(2)] == [16, 8, 10]
    assert ranks.calls == ["begin 11", "wait 11", "begin 3", "wait 3", "begin 5", "wait 5"]


def test_a_new_iteration_forgets_what_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch may end before the data do; an order of one's own need not go on where it was."""
    ranks = TwoRanks()
    monkeypatch.setattr(weight, "dist", ranks)
    tokens = TokensOfRanks()
    tokens.mean(Window(4, 6, True), CPU)
    assert tokens.mean(Window(20, 2, True), CPU).item() == 25
    tokens.close()
    assert ranks.calls[-1] == "wait 2", "and none is left under way"


def test_alone_it_is_ones_own() -> None:
    assert TokensOfRanks().mean(Window(11, 3, True), CPU).item() == 11
