"""Scores every document or pair of a split: a callback of `test` and `validate`, under any
strategy."""

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
from ....processes import from_all_ranks
from ....progress import Progress
from ....text.batches.rows import NOT_COUNTED
from ....text.objectives.next_token import NextToken
from ....text.objectives.objective import objective_of


def _total(batches: Any) -> int | None:
    """Returns the number of batches, which Lightning has for each loader; None if it has no end."""
    total = sum(batches) if isinstance(batches, list) else batches
    return int(total) if total != float("inf") else None


class DocumentScores(Callback):
    """Writes a table of the documents: name, source, bytes, tokens, and nats of the model.

    Of an objective whose values are of documents, such as pairs, nats are the loss, tokens the
    documents themselves, and its `measures` are columns too; of others, its `figures` of tokens.

    Args:
        path: The .parquet file to write; its index is the hash of the text."""

    def __init__(self, path: str) -> None:
        self.path = path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.data: Any = getattr(trainer, "datamodule", None)
        self.module: Any = pl_module
        if not (hasattr(self.data, "documents") and hasattr(pl_module, "sums")):
            raise InputError("evaluate measures texts by their likelihood; use `test` for others")
        self.figures = ["nats", "tokens"]

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        objective = self.objective = objective_of(pl_module) or NextToken()
        self.of_documents = objective.unit == "documents"
        self.figures += objective.measures if self.of_documents else objective.figures
        is_validation, sums = trainer.state.fn == "validate", self.module.sums
        loader: Any = trainer.val_dataloaders if is_validation else trainer.test_dataloaders
        self.documents = self.data.documents("validation" if is_validation else "test")
        batches = trainer.num_val_batches if is_validation else trainer.num_test_batches
        self.progress = Progress("evaluate", "batches", _total(batches))
        self.totals = np.zeros((len(self.figures), len(self.documents.ends)))
        # Rows of tokens that are their own positions: their labels are the labels' positions.
        self.rows = copy.copy(loader.dataset)
        self.rows.tokens = np.arange(len(self.rows.tokens))
        self.nats: list[Tensor] = []
        self.start: int | None = 0  # of this rank's tokens in a row; None: it has no logits
        if self.of_documents:
            self.values: dict[str, Tensor] = {}
            values_of = objective.values

            def record_values(module: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
                self.values = values_of(module, batch)
                return self.values

            vars(objective)["values"] = record_values
            return

        def record(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
            flat = logits.float().flatten(0, 1)
            self.nats.append(F.cross_entropy(flat, labels.flatten(), reduction="none"))
            return sums(logits, labels)

        # where the module computes its loss, on the same chunks of logits
        self.module.sums = self.module.chunked_loss.sums = record

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.is_global_zero:
            self.progress.step()
        if self.of_documents:
            rows = [self.rows.numbers_of(row) for row in self.data.eval_rows if row >= 0]
            values = [self.values["loss"], torch.ones_like(self.values["loss"])]
            for measure in self.objective.measures.values():
                values.append(self.values[measure.values])
            self.totals[:, np.concatenate(rows)] = torch.stack(values).double().cpu().numpy()
            return
        if not self.nats:  # a stage of a pipeline before the output layer
            self.start = None
            return
        counted = batch["labels"].flatten().cpu().numpy() != NOT_COUNTED
        # (B x T,), before the modules'
        nats = torch.cat(self.nats)[: len(counted)].double().cpu().numpy()
        self.nats.clear()
        inputs, labels, _ = map(torch.from_numpy, self.rows.read(self.data.eval_rows))
        shard = getattr(trainer.strategy, "shard_batch", dict)
        part = shard({"input_ids": inputs, "position_ids": inputs, "labels": labels})
        self.start = int(part["input_ids"][0, 0] - inputs[0, 0])
        ends = self.documents.ends
        numbers = np.searchsorted(ends, part["labels"].flatten()[counted], side="right")
        self.totals[0] += np.bincount(numbers, nats[counted], len(ends))
        self.totals[1] += np.bincount(numbers, minlength=len(ends))
        if len(self.figures) > 2:
            numbers = np.searchsorted(ends, part["input_ids"].flatten(), side="right")
            figures = self.objective.newest_figures().flatten(1).cpu()
            for row, values in zip(self.totals[2:], figures, strict=True):
                row += np.bincount(numbers, values, len(ends) + 1)[: len(ends)]

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.progress.done()
        # the ranks of one model-parallel group evaluate the same rows, or parts of them
        found = from_all_ranks((self.data.rank, self.start, self.totals))
        by_rank = {(rank, start): totals for rank, start, totals in found if start is not None}
        if not trainer.is_global_zero:
            return
        if not by_rank:
            name = type(self.objective).__name__
            raise InputError(
                f"evaluate has no loss of single documents: {name} computes it without calling the"
                " module's `sums`; call it, or define `values` of documents"
            )
        import pandas as pd

        columns: dict[str, object] = {
            "sample": self.documents.names,
            "source": self.documents.sources,
        }
        columns |= zip(self.figures, np.sum([*by_rank.values()], axis=0), strict=True)
        tokenizer = self.data.text_tokenizer.backend_tokenizer.to_str().encode()
        columns["tokenizer"] = hashlib.sha256(tokenizer).hexdigest()
        texts = [text.encode() for text in self.documents.texts]
        columns["bytes"] = list(map(len, texts))
        hashes = [hashlib.sha256(text).hexdigest()[:16] for text in texts]
        pd.DataFrame(columns, pd.Index(hashes, name="hash")).to_parquet(self.path)

    on_validation_start, on_validation_end = on_test_start, on_test_end
    on_validation_batch_end = on_test_batch_end
