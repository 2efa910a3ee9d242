"""Hooks, metrics, and what a module keeps."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..arms import Habit
from .rows import EPOCHS, Numbers, Regression, Rows


class EpochWeight(Regression):
    """A weight of the loss that each epoch sets when it starts: a curriculum."""

    weight = 1.0

    def on_train_epoch_start(self) -> None:
        self.weight = 1.0 / (1 + self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weight * super().training_step(batch, batch_idx)


class EpochSums(Regression):
    """A mean over an epoch, kept by hand."""

    def on_train_epoch_start(self) -> None:
        self.sums: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.sums.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch_mean", torch.stack(self.sums).mean(), sync_dist=True)


class StateOfItsOwn(Regression):
    """Saves numpy numbers, arrays and plain containers with the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.seen = np.float64(1.0), np.zeros(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.scale = self.scale * 0.99
        self.seen = self.seen + 1
        return float(self.scale) * super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["own"] = {"scale": self.scale, "seen": self.seen, "names": ("a", "b")}

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.scale, self.seen = checkpoint["own"]["scale"], checkpoint["own"]["seen"]


class SkipsABatch(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


class ReturnsDict(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "extra": batch["row"]}


class Normed(Regression):
    """BatchNorm, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


class Ema(Regression):
    """A buffer that each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.average.mul_(0.9).add_(0.1 * batch["y"].mean())
        return loss + 0.1 * (self(batch["x"]).mean() - self.average.detach()).square().sum()


class UnsyncedMetric(Regression):
    """A validation metric without `sync_dist`, as most people write it."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch))


class TwoValidations(Rows):
    def val_dataloader(self) -> Any:
        return [DataLoader(self.held_out, 2), DataLoader(Numbers(4, seed=2), 2)]


class ValidatesTwo(Regression):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)


HABITS: dict[str, Habit] = {
    "epoch_weight": Habit("EpochWeight", trainer=EPOCHS),
    "epoch_sums": Habit(
        "EpochSums",
        trainer=EPOCHS,
        why="a list that the module keeps and does not save is lost, with Lightning too: a resume"
        " has the sums of what follows, and none at an epoch's end; `self.log(on_epoch=True)` is"
        " saved",
    ),
    "state_of_its_own": Habit("StateOfItsOwn", trainer=EPOCHS),
    "skips_a_batch": Habit("SkipsABatch", trainer=EPOCHS),
    "returns_dict": Habit("ReturnsDict", trainer=EPOCHS),
    "batch_norm": Habit("Normed", trainer=EPOCHS),
    "buffer": Habit("Ema", trainer=EPOCHS),
    "unsynced_metric": Habit("UnsyncedMetric", trainer=EPOCHS),
    "two_validations": Habit("ValidatesTwo", "TwoValidations", EPOCHS),
}
