"""Rehearsals of modules whose ranks differ by nature: BatchNorm, augmentations, noise, several
optimizers. What is equal is still compared, and a fault among it is found."""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dist_template import Project
from dist_template.testing import rehearse
from dist_template.wings.rehearse.same_draws import SeededSamples, state, with_seeded_samples
from tests.support.tiers import tiers

PACKAGE = "tests.wings.rehearse"
FLAGS = ("--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.max_epochs=3")
DDP, FSDP2 = "--trainer.strategy=ddp", "--config=strategy/fsdp2"
UNUSED = "--trainer.strategy=ddp_find_unused_parameters_true"  # one optimizer at a time


class Noisy(Dataset):
    """Draws by torch and by NumPy in each sample."""

    def __init__(self, augments: bool) -> None:
        draw = torch.Generator().manual_seed(0)
        self.images = torch.randn(96, 3, 6, 6, generator=draw)
        self.augments = augments

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        label = (image.mean() > 0).long()
        if self.augments:
            image = image + 0.1 * torch.randn_like(image) + float(np.random.rand())
        return image, label


class Augmented(L.LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Noisy(augments=True), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Noisy(augments=False), self.batch_size)


class Still(Augmented):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(Noisy(augments=False), self.batch_size, shuffle=True)


class Network(L.LightningModule):
    """BatchNorm, dropout, and noise in the forward pass, as a variational autoencoder has."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
            nn.Dropout(0.2), nn.Linear(288, 8), nn.BatchNorm1d(8),
        )  # fmt: skip
        self.head = nn.Linear(8, 2)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.body(images)
        if self.training:
            hidden = hidden + 0.1 * torch.randn_like(hidden)
        return self.head(hidden)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


class PerRank(Network):
    """A fault beside the noise: each rank has a loss of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.global_rank)


class Adversarial(Network):
    """Two optimizers, which it steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # ty: ignore[incompatible-method-override]
        for number, optimizer in enumerate(self.optimizers()):  # ty: ignore[invalid-argument-type]
            self.toggle_optimizer(optimizer)
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1] if number else 1 - batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.05) for part in (self.body, self.head)]


def project(module: type, data: type = Augmented) -> Project:
    return Project(PACKAGE, *(f".test_any_module:{kind.__name__}" for kind in (module, data)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers([DDP, FSDP2], daily=[DDP]))
def test_ranks_are_compared_by_what_is_equal(tmp_path: Path, strategy: str) -> None:
    assert rehearse(project(Network), *FLAGS, strategy, folder=tmp_path, only="one process") == {}


@pytest.mark.slow
def test_a_fault_beside_the_noise_is_found(tmp_path: Path) -> None:
    found = rehearse(project(PerRank), *FLAGS, DDP, folder=tmp_path, only="loss curve")
    assert "from step 1 on" in found["loss curve = one process"]


@pytest.mark.nightly
@pytest.mark.parametrize("only", ["ranks agree", "evaluation", "accumulation", "samples once"])
def test_other_checks_hold_too(tmp_path: Path, only: str) -> None:
    assert rehearse(project(Network), *FLAGS, DDP, folder=tmp_path, only=only) == {}


@pytest.mark.nightly
def test_several_optimizers_are_rehearsed(tmp_path: Path) -> None:
    assert rehearse(project(Adversarial, Still), *FLAGS, UNUSED, folder=tmp_path) == {}


def test_a_sample_draws_the_same_wherever_it_is_read() -> None:
    data = SeededSamples(Noisy(augments=True))
    before = state()
    first = data[3][0]
    assert state() == before, "the training's own generators are left alone"
    torch.randn(5)
    assert torch.equal(data[3][0], first) and not torch.equal(data[4][0], first)
    assert len(data) == 96 and data.images is data.dataset.images


def test_every_loader_of_a_structure_gets_it() -> None:
    loaders = {
        "a": DataLoader(Noisy(augments=False), 4),
        "b": [DataLoader(Noisy(augments=True), 2)],
    }
    assert with_seeded_samples(loaders)
    assert not with_seeded_samples(DataLoader(Noisy(augments=False), 4))
    (one, other) = (next(iter(loaders["b"][0]))[0] for _ in range(2))
    assert torch.equal(one, other)
