"""An image classifier on made-up images, also with manual optimization: it knows no text."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dist_template import OptimConfig, Project, TrainingModule

CLASSES, SIZE, WIDTH = 4, 8, 16


class Images(L.LightningDataModule):
    """Noise over one pattern for each class."""

    def __init__(self, batch_size: int = 4, num_train: int = 96, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_train = num_train
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        draw = torch.Generator().manual_seed(0)
        patterns = torch.randn(CLASSES, 3, SIZE, SIZE, generator=draw)
        num = self.num_train + 64
        labels = torch.randint(CLASSES, (num,), generator=draw)
        images = patterns[labels] + 0.5 * torch.randn(num, 3, SIZE, SIZE, generator=draw)
        self.train = TensorDataset(images[: self.num_train], labels[: self.num_train])
        self.held_out = TensorDataset(images[self.num_train :], labels[self.num_train :])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, self.batch_size)

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> DataLoader:
        # by name: Lightning builds it anew
        return DataLoader(TensorDataset(self.held_out.tensors[0][:8]), batch_size=self.batch_size)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, WIDTH)
        self.mix = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return images + F.gelu(self.mix(self.norm(images)))


class Network(nn.Module):
    """(B, 3, SIZE, SIZE) images to (B, CLASSES) logits."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        images = self.stem(images)
        for block in self.blocks:
            images = block(images)
        return self.head(self.dropout(images).mean((2, 3)))


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).float().mean()


class Classifier(TrainingModule):
    """A subclass of the library's module: its network is built for the strategy."""

    def build_model(self, data: Any) -> nn.Module:
        return Network()

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.track("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits = self(batch[0])
        self.log("eval/loss", F.cross_entropy(logits, batch[1]), sync_dist=True)
        self.log("eval/accuracy", accuracy(logits, batch[1]), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test/loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)


class PlainClassifier(Network, L.LightningModule):
    """As Lightning's own documentation writes one, with attributes of TrainingModule's names."""

    def __init__(self, learning_rate: float = 3e-3, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.learning_rate = learning_rate
        self.optim, self.metrics, self.track = "adam", ["accuracy"], False
        self.eval_metrics = nn.ModuleDict()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.log("train_accuracy", accuracy(logits, batch[1]), sync_dist=True)
        return F.cross_entropy(logits, batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Calls submodules alone."""
        logits = self.head(self.stem(batch[0]).mean((2, 3)))
        self.log("test_loss", F.cross_entropy(logits, batch[1]), sync_dist=True)

    predict_step = Classifier.predict_step

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), self.learning_rate)


def train_manually(module: Any, batch: list[Tensor], batch_idx: int) -> None:
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

    training_step: Any = train_manually

    def configure_optimizers(self) -> Any:
        rest = [*self.stem.parameters(), *self.head.parameters()]
        return [torch.optim.Adam(self.blocks.parameters(), 3e-3), torch.optim.SGD(rest, 1e-2)]


class Built(Classifier):
    def __init__(self, optim: OptimConfig = OptimConfig()) -> None:  # noqa: B008
        super().__init__(optim)
        self.automatic_optimization = False

    training_step: Any = train_manually
    validation_step: Any = PlainClassifier.validation_step


CLASSIFIER = Project("tests.support", ".classifier:Classifier", ".classifier:Images")
PLAIN = Project("tests.support", ".classifier:PlainClassifier", ".classifier:Images")
MANUAL = Project("tests.support", ".classifier:Manual", ".classifier:Images")
BUILT = Project("tests.support", ".classifier:Built", ".classifier:Images")
