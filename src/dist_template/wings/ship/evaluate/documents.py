"""Scores every document of a split: a callback of `test` and `validate`, under any strategy."""

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer
from lightning.pytorch import Callback
from torch import Tensor

from ....errors import InputError
from ....text.batches.rows import NOT_COUNTED
from ....weights import from_all_ranks


class DocumentScores(Callback):
    """Writes a table of the documents: name, source, bytes, tokens, and nats of the model.

    Args:
        path: The .parquet file to write; its index is the hash of the text.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.data: Any = getattr(trainer, "datamodule", None)
        self.module: Any = pl_module
        if not (hasattr(self.data, "documents") and hasattr(pl_module, "sums")):
            raise InputError("evaluate measures texts by their likelihood; use `test` for others")
        if self.data.source.pairs:
            raise InputError(
                "a run on preferences cannot be evaluated or promoted yet: `export` and `serve`"
                " take it, and `validate` measures the loss of its pairs"
            )

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_validation, sums = trainer.state.fn == "validate", self.module.sums
        loader: Any = trainer.val_dataloaders if is_validation else trainer.test_dataloaders
        self.documents = self.data.documents("validation" if is_validation else "test")
        self.totals = np.zeros((2, len(self.documents.ends)))  # nats and tokens
        # Rows of tokens that are their own positions: their labels are the labels' positions.
        self.rows = copy.copy(loader.dataset)
        self.rows.tokens = np.arange(len(self.rows.tokens))
        self.nats: list[Tensor] = []

        def record(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
            flat = logits.float().flatten(0, 1)
            self.nats.append(F.cross_entropy(flat, labels.flatten(), reduction="none"))
            return sums(logits, labels)

        # where the module computes its loss, on the same chunks of logits
        self.module.sums = self.module.chunked_loss.sums = record

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Tensor | Mapping | None,
        batch: Any, batch_idx: int, dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        nats = torch.cat(self.nats).double().cpu().numpy()  # (B x T,)
        self.nats.clear()
        counted = batch["labels"].flatten().cpu().numpy() != NOT_COUNTED
        _, positions, _ = self.rows.read(self.data.eval_rows)
        ends = self.documents.ends
        numbers = np.searchsorted(ends, positions.flatten()[counted], side="right")
        self.totals[0] += np.bincount(numbers, nats[counted], len(ends))
        self.totals[1] += np.bincount(numbers, minlength=len(ends))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # the ranks of one model-parallel group evaluate the same rows
        by_rank = dict(from_all_ranks((self.data.rank, self.totals)))
        if not trainer.is_global_zero:
            return
        import pandas as pd

        columns: dict[str, object] = {"sample": self.documents.names, "source": self.documents.sources}
        columns["nats"], columns["tokens"] = np.sum([*by_rank.values()], axis=0)
        tokenizer = self.data.text_tokenizer.backend_tokenizer.to_str().encode()
        columns["tokenizer"] = hashlib.sha256(tokenizer).hexdigest()
        texts = [text.encode() for text in self.documents.texts]
        columns["bytes"] = list(map(len, texts))
        hashes = [hashlib.sha256(text).hexdigest()[:16] for text in texts]
        pd.DataFrame(columns, pd.Index(hashes, name="hash")).to_parquet(self.path)

    on_validation_start, on_validation_end = on_test_start, on_test_end
    on_validation_batch_end = on_test_batch_end
