"""A resume in the middle of an epoch replays samples: Lightning with a DataLoader, then this
project after a kill."""

from __future__ import annotations

import lightning as L
import torch
from shared import FOLDER, rehearse, show, strategy
from torch.utils.data import DataLoader


class Records(L.LightningModule):
    """Notes the samples that it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.samples: list[int] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.samples += batch.int().tolist()
        return (self.weight * batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(steps: int, checkpoint: str | None) -> tuple[list[int], L.Trainer]:
    off = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", max_steps=steps, enable_checkpointing=False, **off)
    module, data = Records(), DataLoader(torch.arange(16.0), batch_size=2)
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=False)
    return module.samples, trainer


if __name__ == "__main__":
    before, trainer = train(3, None)
    trainer.save_checkpoint(FOLDER / "a.ckpt")
    after = train(6, f"{FOLDER}/a.ckpt")[0]
    holds, line = rehearse("kill and resume", strategy("ddp"), "--trainer.devices=2")
    show(f"samples {before}, resumed with {after}", line, holds and after[0] == 0)
