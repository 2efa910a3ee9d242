"""The model of module.py can learn: tested on this CPU, before it runs on GPUs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_template.testing import batches, build, this_project

PROJECT = this_project(__file__)
CONFIGS = Path(__file__).parents[1] / "configs"
SMALL = ["--data.seq_len=64", "--data.global_batch_size=4", "--data.micro_batch_size=4"]
SMALL += ["--data.num_workers=0"]


@pytest.fixture
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The module with its network, and the data."""
    cache = f"--data.cache_dir={tmp_path_factory.getbasetemp()}/cache"  # made once for all tests
    return build(PROJECT, f"--config={CONFIGS}/quickstart.yaml", *SMALL, cache)


def test_the_initial_loss_is_that_of_a_uniform_guess(built: tuple[Any, Any]) -> None:
    """It is ln V nats. Far above, initialization is too wide; below, labels leak into the input."""
    module, data = built
    loss = module.training_step(batches(data, 1)[0], 0).item()
    assert loss == pytest.approx(math.log(data.vocab_size), rel=0.05)


def test_every_trainable_parameter_gets_a_gradient(built: tuple[Any, Any]) -> None:
    module, data = built
    module.training_step(batches(data, 1)[0], 0).backward()
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    assert [name for name, p in trainable if p.grad is None] == []


def test_one_batch_can_be_overfitted(built: tuple[Any, Any]) -> None:
    module, data = built
    batch = batches(data, 1)[0]
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        losses.append(module.training_step(batch, 0))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0], f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"
