"""Generates a text sample after each validation."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback

from ..observe.loggers.tensorboard import TensorBoard
from ..observe.loggers.wandb import WandB
from .console import only_shows


class Samples(Callback):
    """Continues the first of `data.prompts` and appends the text to `samples.txt`.

    Every rank generates, because a sharded model needs all ranks; rank 0 writes.

    Args:
        folder: The folder of `samples.txt`. null turns samples off.
    """

    def __init__(self, folder: str | None = "{run}") -> None:
        self.folder = folder

    @only_shows
    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        data: Any = trainer.datamodule  # ty: ignore[missing-attribute]
        prompts = getattr(data, "prompts", [])  # only datamodules of text have some
        can_generate = prompts and hasattr(pl_module, "generate")
        if trainer.sanity_checking or not self.folder or not can_generate:
            return
        prompt, tokenizer = prompts[0], data.text_tokenizer
        ids = torch.tensor([tokenizer.encode(prompt)], device=pl_module.device)
        text = tokenizer.decode(pl_module.generate(ids)[0].tolist())
        if not trainer.is_global_zero:
            return
        with open(f"{self.folder}/samples.txt", "a", encoding="utf-8") as file:
            file.write(f"--- step {trainer.global_step}\n{text}\n")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoard | WandB):
                logger.log_sample(text, trainer.global_step)
