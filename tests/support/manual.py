"""A classifier that optimizes manually, with one optimizer for its blocks and one for the rest."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_template import OptimConfig, Project, TrainingModule
from tests.support.classifier import Network, PlainClassifier


class Manual(PlainClassifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        self.log("my/loss", loss.detach(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        own = {id(parameter) for parameter in self.blocks.parameters()}
        rest = [parameter for parameter in self.parameters() if id(parameter) not in own]
        return [torch.optim.Adam(self.blocks.parameters(), 3e-3), torch.optim.SGD(rest, 1e-2)]


class Built(TrainingModule):
    """A TrainingModule that optimizes manually."""

    def __init__(self, optim: OptimConfig = OptimConfig()) -> None:  # noqa: B008
        super().__init__(optim)
        self.automatic_optimization = False

    def build_model(self, data: Any) -> nn.Module:
        return Network()

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("my/loss", loss.detach(), sync_dist=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


MANUAL = Project("tests.support", ".manual:Manual", ".classifier:Images")
MANUAL = Project("tests.support", ".manual:Manual", ".classifier:Images")
BUILT = Project("tests.support", ".manual:Built", ".classifier:Images")
