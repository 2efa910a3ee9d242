"""Faults that one process has as well: what a step predicts, draws and orders, what a validation adds up.

`rehearse` must fail on each and name what is planted.
"""

from __future__ import annotations

import os
import random
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from trainer_dev.data import DataModule
from trainer_dev.module import LanguageModule

from tests.support.faults import after_configure_model
from tests.support.library import GlobalOrder


def labels_shifted_twice() -> None:
    """The data shift labels; the loss shifts them again."""
    sums = LanguageModule.sums

    def shifted(self: Any, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return sums(self, logits, nn.functional.pad(labels[:, 1:], (0, 1), value=-100))

    LanguageModule.sums = shifted


def labels_not_shifted() -> None:
    """Each token is its own label, by an edited transform."""
    transform = DataModule.transform

    def transformed(self: Any, batch: dict[str, Any]) -> dict[str, Any]:
        return transform(self, batch | {"labels": batch["input_ids"].clone()})

    DataModule.transform = transformed


def seed_in_a_step() -> None:
    step = LanguageModule.training_step

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        torch.manual_seed(0)
        return step(self, batch, batch_idx)

    LanguageModule.training_step = training_step


def numpy_seed_in_a_hook() -> None:
    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        np.random.seed(batch_idx)

    LanguageModule.on_train_batch_start = on_train_batch_start


def everything_seeded_between_steps() -> None:
    def on_train_batch_end(self: Any, *args: Any) -> None:
        L.seed_everything(1, verbose=False)

    LanguageModule.on_train_batch_end = on_train_batch_end


def masked_labels_counted() -> None:
    """The mask of labels becomes the token 0."""
    sums = LanguageModule.sums

    def unmasked(self: Any, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return sums(self, logits, labels.clamp(min=0))

    LanguageModule.sums = unmasked


def weights_decay_in_each_micro_batch() -> None:
    def on_train_batch_end(self: Any, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.999)

    LanguageModule.on_train_batch_end = on_train_batch_end


def order_by_hash() -> None:
    """Rows are taken in the order of a string's hash, which each process draws anew."""
    entries = GlobalOrder._entries

    def by_hash(self: GlobalOrder, position: int, count: int) -> list[int]:
        shift = hash("rows") % 997
        return [entries(self, (position // count + shift) * count + number, 1)[0] for number in range(count)]

    GlobalOrder._entries = by_hash


def evaluation_is_a_mean_of_means() -> None:
    """Each batch counts alike, however many labels it has."""

    def validation_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.sums(self(batch), batch["labels"])["loss"] / (batch["labels"] != -100).sum()
        self.log("eval/loss", loss, sync_dist=True, batch_size=1)

    LanguageModule.validation_step = validation_step
    LanguageModule.on_validation_epoch_end = lambda self: None


def head_untied() -> None:
    """The head is replaced after it was tied to the embedding."""

    def change(self: Any) -> None:
        head = self.model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())

    after_configure_model(change)


def parameter_without_optimizer() -> None:
    configure = LanguageModule.configure_optimizers

    def configure_optimizers(self: Any) -> Any:
        found = configure(self)
        group = found["optimizer"].param_groups[0]["params"]
        del group[0]
        return found

    LanguageModule.configure_optimizers = configure_optimizers


def labels_drawn() -> None:
    """Half of the labels are masked, from Python's generator: no fault, and not comparable over ranks."""
    step = LanguageModule.training_step

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = batch["labels"].clone()
        labels[:, random.randrange(8) :: 2] = -100
        return step(self, batch | {"labels": labels}, batch_idx)

    LanguageModule.training_step = training_step


def transform_by_rank() -> None:
    """The data mask other labels on each rank."""

    def transform(self: Any, batch: dict[str, Any]) -> dict[str, Any]:
        labels = batch["labels"].clone()
        labels[:, 2 + self.trainer.global_rank :: 5] = -100
        return batch | {"labels": labels}

    DataModule.transform = transform


def tokens_by_process() -> None:
    """The transform shifts tokens by the process's number, as a generator that a pid seeds would."""
    transform = DataModule.transform

    def transformed(self: Any, batch: dict[str, Any]) -> dict[str, Any]:
        tokens = (batch["input_ids"] + os.getpid()) % 200
        return transform(self, batch | {"input_ids": tokens})

    DataModule.transform = transformed


def loss_scaled_by_a_buffer() -> None:
    """A buffer that no checkpoint has scales the loss, and counts ranks from the second micro-batch on."""
    step = LanguageModule.training_step

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = step(self, batch, batch_idx) * self.scale
        self.scale = torch.full_like(self.scale, self.trainer.world_size)
        return loss

    after_configure_model(lambda self: self.register_buffer("scale", torch.ones(()), persistent=False))
    LanguageModule.training_step = training_step


def dropout_in_evaluation() -> None:
    """A function of torch's that drops out unless its `training` is false."""
    sums = LanguageModule.sums

    def dropped(self: Any, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return sums(self, nn.functional.dropout(logits, 0.1), labels)

    LanguageModule.sums = dropped
