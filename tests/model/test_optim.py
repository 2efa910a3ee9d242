"""Parameter groups, schedules and clipping."""

import math
from itertools import product
from typing import Any, get_args

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from transformers import get_scheduler

from dist_template import InputError, OptimConfig
from dist_template.layout import clip_by_norm
from tests.support.library import optim, total_norm


@pytest.mark.parametrize("schedule", get_args(optim.Schedule))
def test_schedules_are_those_of_transformers_to_the_bit(schedule: Any) -> None:
    """And their states, so a checkpoint of either resumes with the other."""
    sizes = product([1, 7, 300, math.inf], [0, 0.03, 0.5, 6], [0.0, 1 / 3, 1.0])
    for steps, warmup, share in sizes:
        shares: Any = {"min_learning_rate_share": share, "decay_share": share}
        config = OptimConfig(schedule=schedule, warmup=warmup, **shares)
        warmup_steps = int(warmup) if warmup >= 1 or steps == math.inf else int(warmup * steps)
        optimizers = [optim.build_optimizer(nn.Linear(2, 2), config) for _ in range(2)]
        try:
            ours = optim.build_schedule(optimizers[0], config, steps)["scheduler"]
        except InputError:
            no_end = schedule in ("cosine", "linear", "warmup_stable_decay") or warmup < 1
            assert warmup_steps >= steps or (steps == math.inf and no_end)
            continue
        total = None if steps == math.inf else int(steps)
        decay_steps = total and min(max(1, int(share * total)), total - warmup_steps)
        decay = {"num_decay_steps": decay_steps, "min_lr_ratio": share}
        name, options = {
            "cosine": ("cosine_with_min_lr", {"min_lr_rate": share}),
            "constant": ("constant_with_warmup", {}),
            "warmup_stable_decay": (schedule, decay),
        }.get(schedule, (schedule, {}))
        theirs = get_scheduler(name, optimizers[1], warmup_steps, total, options)
        for step in range((total or 300) + 1):
            assert ours.lr_lambdas[0](step) == theirs.lr_lambdas[0](step), step
        optimizers[1].step()
        theirs.step()
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        ours.load_state_dict(theirs.state_dict())
        assert ours.state_dict() == theirs.state_dict()


class Clipped(BoringModel):
    """Keeps the norm of its gradients, as clipping finds it."""

    def configure_optimizers(self) -> Any:
        return optim.build_optimizer(self, OptimConfig(), scaled=self.trainer.scaler is not None)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.norm: Any = clip_by_norm(self.parameters(), 1e-3)


def test_clipping_sees_gradients_without_the_scale_of_float16() -> None:
    scales: Any = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
    norms = []
    for plugins in ([], [scales]):
        torch.manual_seed(0)
        module = Clipped()
        L.Trainer(accelerator="cpu", max_steps=1, barebones=True, plugins=plugins).fit(module)
        norms.append(float(module.norm))
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)


def test_the_norm_of_a_large_gradient_on_a_cpu_is_exact() -> None:
    """One process sums a vocabulary's gradient, each rank a part of it: both must clip alike."""
    gradient = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = gradient.double().norm().item()
    assert abs(torch.linalg.vector_norm(gradient).item() / exact - 1) > 2e-5, "else torch does it"
    assert total_norm([gradient, torch.zeros(3)]).item() == pytest.approx(exact, rel=1e-6)
    assert total_norm([gradient.view(1000, 3000).t()]).item() == pytest.approx(exact, rel=1e-6)
