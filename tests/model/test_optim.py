"""Parameter groups, schedules, clipping, Muon; values by consumed tokens."""

import math
from itertools import product
from types import SimpleNamespace
from typing import Any, get_args

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from transformers import get_scheduler

from dist_template import InputError, OptimConfig
from dist_template.by_tokens import Phase, batch_at, check_phases, divisor_of, value_at
from dist_template.layout import clip_by_norm, total_norm
from dist_template.model import optim
from dist_template.model.any_module import value_now


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
    assert groups[1] == [f"{name}.weight" for name in "table position conv image gate".split()]
    assert "experts.up_bias" in groups[2] and not any("frozen" in name for name in sum(groups, []))
    with pytest.raises(InputError, match="no trained parameter is one: .* adamw"):
        by_muon(nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 3)))


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
    assert all(map(torch.equal, model.parameters(), before))
    assert optimizer.state[model.router.weight]["momentum_buffer"].equal(momentum)
    optimizer.found_inf.zero_()
    optimizer.step()
    assert not model.router.weight.isfinite().any()


T = 10**12
# arXiv:2412.19437, section 4.2, with a step of 256 sequences
BATCH = [Phase(3072, 0), Phase(15360, 0.469 * T, "linear", 256), Phase(15360)]
RATE = [Phase(2.2e-4, 10 * T), Phase(2.2e-5, 14.3 * T, "cosine"), Phase(2.2e-5, 14.633 * T)]
RATE += [Phase(7.3e-6)]


def test_phases_give_the_schedules_of_deepseek_v3() -> None:
    expected = {0: 2.2e-4, 9.99: 2.2e-4, 12.15: 1.21e-4, 14.3: 2.2e-5, 14.6: 2.2e-5, 14.7: 7.3e-6}
    for tokens, rate in expected.items():
        assert value_at(RATE, tokens * T) == pytest.approx(rate, rel=1e-9), tokens
    sizes = [batch_at(BATCH, share * 0.469 * T) for share in (0, 0.021, 0.5, 0.999, 1, 9)]
    assert sizes == [3072, 3328, 9216, 15104, 15360, 15360]
    assert str(Phase(4, 8, "linear")) == "value 4 until 8 shape linear"
    assert (divisor_of(BATCH), divisor_of(BATCH[::2]), divisor_of(48)) == (256, 3072, 48)


WRONG = {
    "the last, which must have none": [Phase(1, 5)],
    "but the last": [Phase(1), Phase(2)],
    "grow from phase to phase": [Phase(1, 5), Phase(2, 5), Phase(3)],
    "0 or more": [Phase(1, -1), Phase(2)],
    "must be constant": [Phase(1, 5, "linear"), Phase(2)],
    "`value` must be 0 or more": [Phase(4, 5), Phase(-8)],
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_phases_are_refused(sentence: str) -> None:
    with pytest.raises(InputError, match=rf"^a\.key has phases until .*{sentence}"):
        check_phases("a.key", WRONG[sentence])


class Data:
    """Two samples of 10 tokens in each step."""

    seq_len, step_samples, consumed_samples = 10, 0, 0
    global_batch_size: Any = 2

    def rates(self, config: OptimConfig, num_steps: int, state: Any = None) -> list[float]:
        optimizer = optim.build_optimizer(nn.Linear(2, 2), config)
        scheduler = optim.build_schedule(optimizer, config, num_steps, data=self)["scheduler"]
        self.found, self.scheduler = [], scheduler
        if state:
            scheduler.load_state_dict(state)
            optimizer.param_groups[0]["lr"] = state["_last_lr"][0]
        for _ in range(num_steps):
            self.found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            self.consumed_samples += 2
            scheduler.step()
        return self.found


LR: Any = [Phase(0.4, 100), Phase(0.2, 120), Phase(0.1)]


def test_phases_of_the_learning_rate_are_multiplied_by_the_warm_up_and_resume() -> None:
    data, config = Data(), OptimConfig(learning_rate=LR, warmup=3)
    assert data.rates(config, 8) == pytest.approx([0, 0.4 / 3, 0.8 / 3, 0.4, 0.4, 0.2, 0.1, 0.1])
    data, other = Data(), OptimConfig(learning_rate=[Phase(0.4, 160), Phase(0.8)], warmup=3)
    first = data.rates(config, 4)
    state = data.scheduler.state_dict()
    assert first + data.rates(config, 4, state) == pytest.approx(Data().rates(config, 8))
    data.consumed_samples = 8
    changed = data.rates(other, 6, state)
    assert changed == pytest.approx([0.4, 0.4, 0.4, 0.4, 0.8, 0.8]), "the peak is the present one"
    number = OptimConfig(learning_rate=0.3, schedule="constant", warmup=0)
    assert data.rates(number, 3, state) == pytest.approx([0.4, 0.3, 0.3]), "and so is a number"


def test_evaluation_has_the_value_at_the_consumed_tokens_also_before_the_first_batch() -> None:
    """A resumed run that starts with a due validation has begun no step yet."""
    data = Data()
    data.step_samples, data.consumed_samples = 0, 11
    for training, value in ((True, 0.4), (False, 0.2)):
        module: Any = SimpleNamespace(trainer=SimpleNamespace(datamodule=data, training=training))
        assert value_now(module, "a.key", LR) == value


def test_what_does_not_work_with_phases_is_refused() -> None:
    config, data = OptimConfig(learning_rate=LR), Data()
    optimizer = optim.build_optimizer(nn.Linear(2, 2), config)
    with pytest.raises(InputError, match="is 0 in each phase"):
        OptimConfig(learning_rate=[Phase(0)])
    with pytest.raises(InputError, match="BoringDataModule, which does not count tokens"):
        optim.build_schedule(optimizer, config, 10, data=BoringDataModule())
    module: Any = SimpleNamespace(trainer=SimpleNamespace(datamodule=BoringDataModule()))
    with pytest.raises(InputError, match=r"^a\.key has phases, and BoringDataModule does not"):
        value_now(module, "a.key", LR)
    constant = "torch.optim.lr_scheduler.ConstantLR"
    config.lr_scheduler_class = {"class_path": constant, "init_args": {}}
    with pytest.raises(InputError, match="do not work with --lr_scheduler"):
        optim.build_schedule(optimizer, config, 10, data=data)
    data.global_batch_size, config = [Phase(2)], OptimConfig()
    plateau = "lightning.pytorch.cli.ReduceLROnPlateau"
    config.lr_scheduler_class = {"class_path": plateau, "init_args": {"monitor": "eval/loss"}}
    with pytest.raises(InputError, match="ReduceLROnPlateau does not work with phases"):
        optim.build_schedule(optimizer, config, 10, data=data)
