"""Muon beside AdamW trains to the same numbers under every strategy, and resumes exactly."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support import parity
from tests.support.adapters import TARGETS, flags, with_random_b
from tests.support.library import Owners
from tests.support.parity import PROCESSES, PauseAfter, Trainings
from tests.support.runs import newest
from tests.support.tiers import tiers

MUON = "--model.optim.optimizer=muon"
MESHES = [name for name in PROCESSES if not name.startswith("zero")]
CASES = [("deepseek_v3", name) for name in MESHES]
CASES += [("llama", name) for name in ("fsdp2", "fsdp2_tp", "pp")] + [("mtp", "pp")]
DAILY = [("deepseek_v3", name) for name in ("ddp", "fsdp2_tp_ep")]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy"), tiers(CASES, DAILY))
def test_a_strategy_trains_by_muon_to_the_numbers_of_one_process(
    train: Trainings, model: str, strategy: str
) -> None:
    parity.assert_trains_alike(train(model, strategy, MUON), train(model, "one", MUON))


@pytest.mark.slow
@pytest.mark.parametrize("strategies", tiers(["one tp fsdp2_ep pp ddp", "ddp fsdp2 one"], []))
def test_a_training_by_muon_continues_from_strategy_to_strategy(
    train: Trainings, strategies: str
) -> None:
    """A leg has the losses of the uninterrupted training, to the bit if it is the same strategy."""
    whole, checkpoint, legs = train("deepseek_v3", "one", MUON).loss, [MUON], strategies.split()
    for step, strategy in enumerate(legs, start=1):
        pause = [PauseAfter(step)] if step < len(legs) else []
        leg = train.run("fit", "deepseek_v3", strategy, *checkpoint, callbacks=pause)
        expected = {at: whole[at] for at in leg.loss}
        assert step in expected and leg.loss == pytest.approx(expected, rel=1e-5), strategy
        checkpoint = [MUON, f"--ckpt_path={newest(leg.run)}"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["fsdp2", "ddp", "pp_ep"], ["fsdp2"]))
def test_a_training_by_muon_resumes_exactly(train: Trainings, strategy: str) -> None:
    whole = train("deepseek_v3", strategy, MUON)
    paused = train.run("fit", "deepseek_v3", strategy, MUON, callbacks=[PauseAfter(3)])
    resumed = [MUON, f"--ckpt_path={newest(paused.run)}"]
    later = train.run("fit", "deepseek_v3", strategy, *resumed)
    assert later.loss == {step: loss for step, loss in whole.loss.items() if step > 3}
    parity.assert_close(later.end, whole.end, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["fsdp2_tp"], []))
def test_adapters_train_by_muon_as_one_process(train: Trainings, strategy: str) -> None:
    keys = [*flags(TARGETS["llama"]), "--model.optim.warmup=2", "--trainer.precision=32-true", MUON]
    one, many = (train("llama", n, *keys, prelude=with_random_b) for n in ("one", strategy))
    parity.assert_trains_alike(many, one)


def test_owners_have_equal_work() -> None:
    """By rows x columns x the smaller of both, over the ranks that share a matrix."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh, owned = init_device_mesh("cpu", (4,)), []
        for shape in [(64, 32), (32, 64), (32, 32), (32, 32)] * 8 + [(8, 128)]:
            full = torch.zeros(shape, requires_grad=False)
            owned.append(nn.Parameter(distribute_tensor(full, mesh, [Shard(0)])))
        owners = Owners()
        seen: list[int] = []

        def compute(matrix: torch.Tensor) -> torch.Tensor:
            seen.append(matrix.numel() * min(matrix.shape))
            return matrix

        for _ in owners.run(owned, lambda parameter: parameter.to_local().clone(), compute):
            pass
        total = sum(math.prod(p.shape) * min(p.shape) for p in owned)
        assert sum(seen) == pytest.approx(total / 4, rel=0.15)
    finally:
        dist.destroy_process_group()
