"""Parameter groups, schedules and clipping."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, get_args

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_scheduler

from dist_template import InputError, OptimConfig
from dist_template.layout import clip_by_norm
from tests.support.library import optim, total_norm


def learning_rates(num_steps: int, **options: object) -> list[float]:
    """The learning rate that each of `num_steps` optimizer steps uses."""
    config = OptimConfig(learning_rate=1.0, **options)
    optimizer = optim.build_optimizer(nn.Linear(2, 2), config)
    scheduler = optim.build_schedule(optimizer, config, num_steps)["scheduler"]
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", get_args(optim.Schedule)[:5])
def test_schedules_are_those_of_transformers_to_the_bit(schedule: Any) -> None:
    """And their states, so a checkpoint of either resumes with the other."""
    for steps, warmup, share in product([1, 7, 300, math.inf], [0, 0.03, 0.5, 6], [0.0, 1 / 3, 1.0]):
        config = OptimConfig(schedule=schedule, warmup=warmup, min_learning_rate_share=share, decay_share=share)
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
        name, options = {
            "cosine": ("cosine_with_min_lr", {"min_lr_rate": share}),
            "constant": ("constant_with_warmup", {}),
            "warmup_stable_decay": (schedule, {"num_decay_steps": decay_steps, "min_lr_ratio": share}),
        }.get(schedule, (schedule, {}))
        theirs = get_scheduler(name, optimizers[1], warmup_steps, total, options)
        until = range((total or 300) + 1)
        assert [ours.lr_lambdas[0](step) for step in until] == [theirs.lr_lambdas[0](step) for step in until]
        optimizers[1].step()
        theirs.step()
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        ours.load_state_dict(theirs.state_dict())
        assert ours.state_dict() == theirs.state_dict()


def test_only_matrices_decay() -> None:
    module = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = optim.build_optimizer(module, OptimConfig(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in module.named_parameters():
        assert decay[id(parameter)] == (0.1 if name in ("0.weight", "1.weight") else 0.0), name


def test_frozen_parameters_are_left_out_and_nothing_to_train_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(False)
    assert sum(len(g["params"]) for g in optim.build_optimizer(module, OptimConfig()).param_groups) == 1
    module.bias.requires_grad_(False)
    with pytest.raises(InputError, match="nothing to train"):
        optim.build_optimizer(module, OptimConfig())


class Clipped(L.LightningModule):
    """One matrix; keeps the norm of its gradients, as clipping finds it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return optim.build_optimizer(self, OptimConfig(), scaled=self.trainer.scaler is not None)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.norm: Any = clip_by_norm(self.parameters(), 1e-3)


def test_clipping_sees_gradients_without_the_scale_of_float16() -> None:
    norms, rows = [], DataLoader(TensorDataset(torch.ones(4, 8)), 4)
    scales: Any = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
    for plugins in ([], [scales]):
        module = Clipped()
        L.Trainer(accelerator="cpu", max_steps=1, barebones=True, plugins=plugins).fit(module, rows)
        norms.append(float(module.norm))
    assert norms[1] == pytest.approx(norms[0], rel=1e-2), "256 times as large where the scale is still there"


def test_warmup_counts_steps_from_1_and_shares_below() -> None:
    assert learning_rates(20, schedule="constant", warmup=4)[:6] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rates(20, schedule="constant", warmup=0.2) == learning_rates(20, schedule="constant", warmup=4)


def test_cosine_ends_at_its_floor() -> None:
    rates = learning_rates(101, schedule="cosine", warmup=0, min_learning_rate_share=0.1)
    # floor + (1 - floor) * (1 + cos(pi * step / 101)) / 2
    assert rates[50] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 50 / 101)) / 2)
    assert rates[100] == pytest.approx(0.1, abs=1e-3)


def test_linear_falls_to_zero() -> None:
    assert learning_rates(10, schedule="linear", warmup=0) == pytest.approx([1 - i / 10 for i in range(10)])


def test_warmup_stable_decay_is_flat_then_falls() -> None:
    rates = learning_rates(100, schedule="warmup_stable_decay", warmup=10, decay_share=0.2)
    assert rates[10:80] == [1.0] * 70
    assert rates[80] == pytest.approx(1.0) and rates[99] < 0.12
    assert all(a >= b for a, b in zip(rates[80:], rates[81:], strict=False))


def test_inverse_sqrt_halves_when_steps_quadruple() -> None:
    rates = learning_rates(401, schedule="inverse_sqrt", warmup=100)
    assert rates[100] == pytest.approx(1.0) and rates[400] == pytest.approx(0.5)


def test_plateau_watches_its_metric_after_validation() -> None:
    config = OptimConfig(schedule="reduce_on_plateau", plateau_patience=0, plateau_factor=0.5)
    optimizer = optim.build_optimizer(nn.Linear(2, 2), config)
    entry = optim.build_schedule(optimizer, config, math.inf)
    assert entry["monitor"] == "eval/loss" and entry["reduce_on_plateau"]
    for loss in (1.0, 2.0):
        entry["scheduler"].step(loss)
    assert optimizer.param_groups[0]["lr"] == config.learning_rate / 2


@pytest.mark.parametrize(("steps", "warmup", "message"), [(math.inf, 0.1, "max_steps"), (10, 10, "not shorter")])
def test_a_schedule_that_cannot_be_is_refused(steps: float, warmup: float, message: str) -> None:
    config = OptimConfig(warmup=warmup)
    with pytest.raises(InputError, match=message):
        optim.build_schedule(optim.build_optimizer(nn.Linear(2, 2), config), config, steps)


@pytest.mark.parametrize("max_norm", [0.5, 100.0, None])
def test_clipping_equals_torchs_own(max_norm: float | None) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(3, 3), torch.randn(3)]
    ours, theirs = nn.Linear(3, 3), nn.Linear(3, 3)
    for module in (ours, theirs):
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
    norm = clip_by_norm(ours.parameters(), max_norm)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or math.inf)
    assert norm == expected
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_the_norm_of_a_large_gradient_on_a_cpu_is_exact() -> None:
    """One process sums a vocabulary's gradient, and each rank a part of it: both must clip alike."""
    gradient = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = gradient.double().norm().item()
    assert abs(torch.linalg.vector_norm(gradient).item() / exact - 1) > 2e-5, "else torch does it"
    assert total_norm([gradient, torch.zeros(3)]).item() == pytest.approx(exact, rel=1e-6)
    assert total_norm([gradient.view(1000, 3000).t()]).item() == pytest.approx(exact, rel=1e-6)
