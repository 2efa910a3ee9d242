"""Optimizers and their schedules."""

from typing import Any

import numpy as np
import torch
from torch.optim import lr_scheduler as schedules

from ..arms import Habit
from .rows import EPOCHS, Regression


class PerStep(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = schedules.CosineAnnealingLR(optimizer, 20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class PerEpoch(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        return [optimizer], [schedules.StepLR(optimizer, 1, 0.5)]


class EveryThird(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = schedules.ExponentialLR(optimizer, 0.8)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 3}]


class WarmupThenPlateau(Regression):
    """Two schedules of one optimizer, per step and per epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(0.1)
        warmup = schedules.LinearLR(optimizer, 0.25, total_iters=8)
        plateau = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [
            {"scheduler": warmup, "interval": "step"},
            {"scheduler": plateau, "interval": "epoch", "monitor": "val_loss"},
        ]


class PlateauThenWarmup(Regression):
    """The same two, in the other order."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(0.1)
        warmup = schedules.LinearLR(optimizer, 0.25, total_iters=8)
        plateau = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [
            {"scheduler": plateau, "interval": "epoch", "monitor": "val_loss"},
            {"scheduler": warmup, "interval": "step"},
        ]


class WarmupThenDecay(Regression):
    """Two chainable schedules, per step and per epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(0.1)
        warmup = schedules.LinearLR(optimizer, 0.25, total_iters=8)
        decay = schedules.ExponentialLR(optimizer, 0.7)
        return [optimizer], [
            {"scheduler": warmup, "interval": "step"},
            {"scheduler": decay, "interval": "epoch"},
        ]


class Plateau(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "train_loss"},
        }


class OneCycle(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        total = self.trainer.estimated_stepping_batches
        schedule = schedules.OneCycleLR(optimizer, 0.1, total_steps=int(total))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Sequential(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        parts = [
            schedules.LinearLR(optimizer, 0.1, total_iters=4),
            schedules.CosineAnnealingLR(optimizer, 10),
        ]
        schedule = schedules.SequentialLR(optimizer, parts, milestones=[4])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class WarmRestarts(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = schedules.CosineAnnealingWarmRestarts(optimizer, 4, 2)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class NumpyLambda(Regression):
    """A rate by numpy: the numbers in the schedule's and the optimizer's state are numpy's."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = schedules.LambdaLR(
            optimizer, lambda step: np.interp(step, [0, 6, 18], [0.1, 1.0, 0.1])
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class OwnSchedulerStep(PerStep):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        for group in scheduler.optimizer.param_groups:
            group["lr"] = max(group["lr"], 0.01)


class TwoOptimizers(Regression):
    """Manual optimization of two optimizers with a schedule each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
        self.manual_backward(self.loss_of(batch))
        first.step()
        if batch_idx % 2:
            second.step()
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.net[0].parameters(), 0.05, momentum=0.9)
        second = torch.optim.Adam(self.net[2].parameters(), 0.01)
        rates = [schedules.StepLR(first, 4, 0.5), schedules.ExponentialLR(second, 0.9)]
        return [first, second], rates


class Unfreezes(Regression):
    """The first layer is trained from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch >= 1)


class OwnClipping(Regression):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class Lbfgs(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)


HABITS: dict[str, Habit] = {
    "per_step": Habit("PerStep", trainer=EPOCHS),
    "per_epoch": Habit("PerEpoch", trainer=EPOCHS),
    "every_third": Habit("EveryThird", trainer=EPOCHS),
    "warmup_then_plateau": Habit("WarmupThenPlateau", trainer=EPOCHS),
    "plateau_then_warmup": Habit("PlateauThenWarmup", trainer=EPOCHS),
    "warmup_then_decay": Habit("WarmupThenDecay", trainer=EPOCHS),
    "plateau": Habit("Plateau", trainer=EPOCHS),
    "one_cycle": Habit("OneCycle", trainer=EPOCHS),
    "sequential": Habit("Sequential", trainer=EPOCHS),
    "warm_restarts": Habit("WarmRestarts", trainer=EPOCHS),
    "numpy_lambda": Habit("NumpyLambda", trainer=EPOCHS),
    "own_scheduler_step": Habit("OwnSchedulerStep", trainer=EPOCHS),
    "two_optimizers": Habit("TwoOptimizers", trainer=EPOCHS),
    "lbfgs": Habit("Lbfgs", trainer=EPOCHS),
    "own_clipping": Habit("OwnClipping", trainer=EPOCHS),
    "unfreezes": Habit("Unfreezes", trainer=EPOCHS),
}
