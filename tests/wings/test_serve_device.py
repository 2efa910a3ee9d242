"""`serve` computes in bf16 on a GPU that can, in fp32 elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dist_template.wings.ship.serve.command import on_device


@pytest.mark.parametrize(
    ("device", "supports", "dtype"),
    [("cuda", True, torch.bfloat16), ("cuda", False, torch.float32), ("cpu", True, torch.float32)],
)
def test_parameters_are_bf16_where_the_gpu_computes_in_it(
    device: str, supports: bool, dtype: torch.dtype, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supports)
    monkeypatch.setattr(nn.Module, "to", lambda self, device: self)
    model: Any = nn.Linear(2, 2)
    model.register_buffer("frequencies", torch.ones(2))
    assert on_device(model, device) is model
    assert model.weight.dtype == dtype and model.get_buffer("frequencies").dtype == torch.float32
