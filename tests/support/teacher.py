"""A classifier with an average of its weights, updated where Lightning's documentation says: once
in each step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from dist_template import Project
from tests.support.classifier import Images, PlainClassifier

HOOKS = ("optimizer_step", "on_before_optimizer_step", "on_before_zero_grad", "optimizer_zero_grad")


class Student(PlainClassifier):
    """Logs the sum of the average's squares, and how often each of `HOOKS` was called."""

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
        with torch.no_grad(), _gathered(list(self.parameters())):
            weights = [parameter.detach().clone() for parameter in self.parameters()]
        self.teacher = self.teacher or weights
        self.teacher = [
            0.5 * old + 0.5 * new for old, new in zip(self.teacher, weights, strict=True)
        ]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls["on_before_optimizer_step"] += 1

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls["on_before_zero_grad"] += 1

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.calls["optimizer_zero_grad"] += 1
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)


class OwnOrder(DataLoader):
    """Of its own class, so that an epoch's last step may have fewer micro-batches than the
    others."""


class OwnOrderImages(Images):
    def train_dataloader(self) -> DataLoader:
        return OwnOrder(self.train, self.batch_size, sampler=DistributedSampler(self.train))


def _gathered(parameters: list[Any]) -> Any:
    if not hasattr(parameters[0], "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


STUDENT = Project("tests.support", ".teacher:Student", ".teacher:Images")
STUDENT_WITH_OWN_ORDER = Project("tests.support", ".teacher:Student", ".teacher:OwnOrderImages")
