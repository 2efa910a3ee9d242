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


class Routed(nn.Module):
    """A layer with stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 3
        self.up, self.up_bias = nn.Parameter(torch.randn(3, 8, 6)), nn.Parameter(torch.randn(3, 8))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.position = nn.Embedding(5, 6), nn.Embedding(4, 6)
        self.conv, self.image = nn.Conv1d(6, 6, 3), nn.Conv2d(2, 2, 3)
        self.router, self.experts, self.gate = nn.Linear(6, 3), Routed(), nn.Linear(6, 1)
        self.frozen, self.head = nn.Linear(6, 6), nn.Linear(6, 5, bias=False)
        self.frozen.requires_grad_(False)
        self.output = nn.Linear(6, 5, bias=False)
        self.output.weight = self.table.weight
        for parameter in self.parameters():
            parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None


def by_muon(model: nn.Module, **options: Any) -> Any:
    config = OptimConfig(optimizer="muon", learning_rate=0.1, **options)
    return optim.build_optimizer(model, config)


def test_muon_updates_matrices_and_adamw_the_rest() -> None:
    model = Model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names[p] for p in group["params"]] for group in by_muon(model).param_groups]
    assert groups[0] == ["router.weight", "experts.up", "head.weight"], "the output layer is tied"
    assert groups[1] == [
        "table.weight",
        "position.weight",
        "conv.weight",
        "image.weight",
        "gate.weight",
    ]
    assert "experts.up_bias" in groups[2] and not any("frozen" in name for name in sum(groups, []))
    alone = nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 3))
    with pytest.raises(InputError, match="no trained parameter is one: .* adamw"):
        by_muon(alone)


@pytest.mark.parametrize("nesterov", [True, False])
def test_updates_are_those_of_torchs_classes(monkeypatch: Any, nesterov: bool) -> None:
    """In float32, as this library iterates on a CPU; each of the stacked experts is a matrix."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.float().clone())
    model, theirs = Model(), Model()
    config = OptimConfig(learning_rate=0.1)
    chosen: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "nesterov": nesterov}
    config.optimizer_class = {"class_path": "torch.optim.Muon", "init_args": chosen}
    ours, experts = optim.build_optimizer(model, config), list(theirs.experts.up.detach().clone())
    gradients: Any = theirs.experts.up.grad
    adamw = torch.optim.AdamW([theirs.table.weight], 0.1, (0.9, 0.95), weight_decay=0.1, fused=True)
    given = [theirs.router.weight, theirs.head.weight, *experts]
    muon = torch.optim.Muon(given, **chosen, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for expert, gradient in zip(experts, gradients, strict=True):
            expert.grad = gradient
        for each in (ours, adamw, muon):
            each.step()
    assert model.table.weight.equal(theirs.table.weight)
    torch.testing.assert_close(model.router.weight, theirs.router.weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(model.experts.up.detach(), torch.stack(experts), rtol=0, atol=1e-5)


def test_muon_changes_nothing_in_a_step_that_is_skipped() -> None:
    """`found_inf` is how callbacks/numerics.py skips a step without waiting for the device."""
    model = Model()
    optimizer = by_muon(model)
    optimizer.step()
    before = [each.detach().clone() for each in model.parameters()]
    momentum = optimizer.state[model.router.weight]["momentum_buffer"].clone()
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for parameter, expected in zip(model.parameters(), before, strict=True):
        assert parameter.equal(expected)
    assert optimizer.state[model.router.weight]["momentum_buffer"].equal(momentum)
    optimizer.found_inf.zero_()
    optimizer.step()
    assert not model.router.weight.isfinite().any()
