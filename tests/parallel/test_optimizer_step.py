"""A module's hooks of an optimizer step run once per step under every strategy."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from dist_template import Project
from tests.support.classifier import Images, PlainClassifier
from tests.support.runs import Workers, logged
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
