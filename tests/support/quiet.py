"""A plain Trainer on one process that shows and writes nothing, and the data of one loader."""

from typing import Any

import lightning as L

QUIET: Any = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}


class OfLoader(L.LightningDataModule):
    """Trains on a loader that is made elsewhere."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader
