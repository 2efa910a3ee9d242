"""compat/torch.py's `step_of`: an optimizer's step without torch's profiler range, and when the range stays."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from dist_template.compat.torch import step_of


@pytest.fixture
def optimizer() -> torch.optim.AdamW:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return torch.optim.AdamW([parameter], lr=0.1)


def is_short(optimizer: torch.optim.Optimizer) -> bool:
    return step_of(optimizer) != optimizer.step


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_it_steps_as_the_optimizer_does(kind: Any) -> None:
    models = [nn.Linear(5, 3, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, shortened in zip(models, (False, True), strict=True):
        optimizer = kind(model.parameters(), lr=0.1)
        for _ in range(3):
            model.weight.grad = torch.arange(15.0).view(3, 5)
            assert is_short(optimizer)
            (step_of(optimizer) if shortened else optimizer.step)()
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_schedule_knows_that_the_optimizer_was_called(optimizer: torch.optim.AdamW) -> None:
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    assert is_short(optimizer)
    step_of(optimizer)()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where a schedule comes before its optimizer
        schedule.step()


def test_hooks_are_called(optimizer: torch.optim.AdamW) -> None:
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda *call: calls.append(call))
    optimizer.register_step_post_hook(lambda *call: calls.append(call))
    handle = register_optimizer_step_post_hook(lambda *call: calls.append(call))
    step_of(optimizer)()
    handle.remove()
    assert len(calls) == 3


def test_a_profiler_sees_the_range(optimizer: torch.optim.AdamW) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step_of(optimizer)()
    assert "Optimizer.step#AdamW.step" in {event.key for event in profiler.key_averages()}


def test_an_optimizer_of_a_class_without_torchs_range_is_called_as_it_is(
    optimizer: torch.optim.AdamW,
) -> None:
    class Engine:  # DeepSpeed's inherit from Optimizer and never run its constructor
        def step(self, closure: Any = None) -> str:
            return "own"

    assert step_of(Engine())() == "own"
