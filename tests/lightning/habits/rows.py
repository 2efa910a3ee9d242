"""What all habits share: rows of four numbers, their loaders, and a network of 57 weights."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

NUM_TRAIN, NUM_VALIDATION = 24, 8


class Numbers(Dataset):
    """`count` rows of four numbers and their target."""

    def __init__(self, count: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 4, generator=draw)
        self.y = self.x[:, :1] * self.x[:, 1:2] + 0.5 * self.x[:, 2:3]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"x": self.x[row], "y": self.y[row], "row": torch.tensor(row)}


class Rows(L.LightningDataModule):
    """Plain loaders, in the order of the rows."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.train = Numbers(NUM_TRAIN)
        self.held_out = Numbers(NUM_VALIDATION, seed=1)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(self.held_out, self.batch_size)


class Regression(L.LightningModule):
    """As Lightning's documentation begins."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss_of(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def optimizer(self, rate: float = 0.05) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), rate, momentum=0.9)

    def configure_optimizers(self) -> Any:
        return self.optimizer()


EPOCHS: dict[str, Any] = {"max_epochs": 3}
# Why an epoch's last step differs.
MEAN = (
    "the last step of an epoch has one batch of two, and Lightning's gradient is half of its mean:"
    " https://github.com/Lightning-AI/pytorch-lightning/issues/19987"
)
