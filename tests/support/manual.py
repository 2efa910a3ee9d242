"""Classifiers that optimize manually: with two optimizers, and as a TrainingModule."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_template import OptimConfig, Project
from tests.support.classifier import Classifier, PlainClassifier


def train(module: Any, batch: list[Tensor], batch_idx: int) -> None:
    loss = F.cross_entropy(module(batch[0]), batch[1])
    given = module.optimizers()
    optimizers = given if isinstance(given, list) else [given]
    for optimizer in optimizers:
        optimizer.zero_grad()
    module.manual_backward(loss)
    for optimizer in optimizers:
        optimizer.step()
    module.log("my/loss", loss.detach(), sync_dist=True)


class Manual(PlainClassifier):
    """One optimizer has the blocks, the other one the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    training_step: Any = train

    def configure_optimizers(self) -> Any:
        rest = [*self.stem.parameters(), *self.head.parameters()]
        return [torch.optim.Adam(self.blocks.parameters(), 3e-3), torch.optim.SGD(rest, 1e-2)]


class Built(Classifier):
    def __init__(self, optim: OptimConfig = OptimConfig()) -> None:  # noqa: B008
        super().__init__(optim)
        self.automatic_optimization = False

    training_step: Any = train
    validation_step: Any = PlainClassifier.validation_step


MANUAL = Project("tests.support", ".manual:Manual", ".classifier:Images")
BUILT = Project("tests.support", ".manual:Built", ".classifier:Images")
