"""Checkpoints of one device and DDP are copied from a GPU through page-locked memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.serialization import config

from tests.support.library import formats


def test_a_save_asks_torch_for_page_locked_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda *args: asked.append(config.save.use_pinned_memory_for_d2h) or save(*args))
    formats.PlainFormat(SingleDeviceStrategy("cpu")).save_checkpoint(
        {"state_dict": {"weight": torch.ones(2)}}, tmp_path
    )
    assert asked == [True] and not config.save.use_pinned_memory_for_d2h
    assert torch.load(tmp_path / formats.FILE)["state_dict"]["weight"].tolist() == [1, 1]
