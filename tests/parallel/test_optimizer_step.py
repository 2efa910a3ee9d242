"""An optimizer step under every strategy: its hooks run once; Muon trains to the same numbers."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler

from dist_template import Project
from tests.support import parity
from tests.support.adapters import TARGETS, flags, with_random_b
from tests.support.classifier import Images, PlainClassifier
from tests.support.library import Owners
from tests.support.parity import PROCESSES, PauseAfter, Trainings
from tests.support.runs import Workers, logged, newest
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

HOOKS = ("optimizer_step", "on_before_optimizer_step", "on_before_zero_grad", "optimizer_zero_grad")
STEPS = 8


class Student(PlainClassifier):
    """Keeps an average of its weights, updated where Lightning's documentation says: once in each
    step. Logs the sum of the average's squares, and how often each of `HOOKS` was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = dict.fromkeys(HOOKS, 0)
        self.teacher: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log_dict({name: float(count) for name, count in self.calls.items()})
        self.log("teacher", sum(float(each.square().sum()) for each in self.teacher))
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.calls["optimizer_step"] += 1
        with torch.no_grad(), gathered(list(self.parameters())):
            weights = [parameter.detach().clone() for parameter in self.parameters()]
        self.teacher = self.teacher or weights
        pairs = zip(self.teacher, weights, strict=True)
        self.teacher = [0.5 * old + 0.5 * new for old, new in pairs]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls["on_before_optimizer_step"] += 1

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls["on_before_zero_grad"] += 1

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.calls["optimizer_zero_grad"] += 1
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)


class OwnOrder(DataLoader):
    """A user's own class: an epoch's last step may have fewer micro-batches than the others."""


class OwnOrderImages(Images):
    def train_dataloader(self) -> DataLoader:
        return OwnOrder(self.train, self.batch_size, sampler=DistributedSampler(self.train))


def gathered(parameters: list[Any]) -> Any:
    if not hasattr(parameters[0], "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def values(folder: Path, strategy: str, *more: str) -> dict[str, dict[int, float]]:
    """10 micro-batches on a rank in steps of 4: an epoch's third step has 2."""
    given = [
        "fit", f"--run.root={folder / 'runs'}", "--run.report=false", "--trainer.accelerator=cpu",
        "--trainer.devices=2", f"--trainer.max_steps={STEPS}", "--trainer.log_every_n_steps=1",
        "--trainer.accumulate_grad_batches=4", "--data.batch_size=2", "--data.num_train=40",
        f"--run.name={strategy}", "--best_checkpoint.monitor=val_loss", *flags_of(strategy), *more,
    ]  # fmt: skip
    here = ".test_optimizer_step"
    project = Project("tests.parallel", f"{here}:Student", f"{here}:OwnOrderImages")
    record = Workers(2, project).run(given, folder / strategy).check()
    names = (*HOOKS, "teacher", "train/loss", "val_loss")
    return {name: logged(record.run, name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("profiler", tiers(["null", "simple"], daily=["null"]))
def test_hooks_and_averages_of_a_step_are_those_of_ddp(tmp_path: Path, profiler: str) -> None:
    """With a profiler, Lightning's own loop runs."""
    expected = values(tmp_path, "ddp", flag := f"--trainer.profiler={profiler}")
    assert [*expected["optimizer_step"].values()] == [*range(STEPS)], "none before the first"
    assert expected["teacher"][STEPS] > 0
    for strategy in ("zero1", "zero2", "zero3"):
        got = values(tmp_path, strategy, flag)
        for name, series in expected.items():
            assert got[name] == pytest.approx(series, rel=1e-5), f"{strategy}: {name}"


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
