"""Scores every document of a split: a callback of `test` and `validate`, under any strategy."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor

from .... import weights
from ....errors import InputError
from ....text.batches.rows import NOT_COUNTED
from ..export.onnx import OnnxModel


class DocumentScores(Callback):
    """Writes a table of the documents: name, source, text, bytes, tokens, and nats of the model.

    Args:
        path: The .parquet file to write; its index is the hash of the text.
        onnx: A folder of `export --to onnx`, whose model replaces the module's.
    """

    def __init__(self, path: str, onnx: str | None = None) -> None:
        self.path, self.onnx = path, onnx

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        data = trainer.datamodule
        if not (hasattr(data, "documents") and hasattr(pl_module, "sums")):
            raise InputError("evaluate measures texts by their likelihood; use `test` for others")
        if data.source.pairs:
            raise InputError(
                "a run on preferences cannot be evaluated or promoted yet: `export` and `serve`"
                " take it, and `validate` measures the loss of its pairs"
            )
        pl_module.loss_kernel = "torch"  # Liger's gives one sum for all tokens

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        split, own = {"validate": "validation"}.get(trainer.state.fn, "test"), pl_module.sums
        self.documents, self.nats = trainer.datamodule.documents(split), []
        self.sums = np.zeros((2, len(self.documents.ends)))
        # rows of tokens that are their own positions: their labels are the labels' positions
        self.rows = copy.copy((trainer.test_dataloaders or trainer.val_dataloaders).dataset)
        self.rows.tokens = np.arange(len(self.rows.tokens))
        if self.onnx:
            pl_module.model.forward = OnnxRows(OnnxModel(Path(self.onnx)))

        def recorded(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
            flat = logits.float().flatten(0, 1)
            self.nats.append(F.cross_entropy(flat, labels.flatten(), reduction="none"))
            return own(logits, labels)

        # where the module computes its loss, on the same chunks of logits
        pl_module.sums = pl_module.chunked_loss.sums = recorded

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        nats = torch.cat(self.nats).double().cpu().numpy()  # (B x T,)
        self.nats.clear()
        counted = batch["labels"].flatten().cpu().numpy() != NOT_COUNTED
        _, positions, _ = self.rows.read(trainer.datamodule.eval_rows)
        ends = self.documents.ends
        numbers = np.searchsorted(ends, positions.flatten()[counted], side="right")
        self.sums += [np.bincount(numbers, each, len(ends)) for each in (nats[counted], None)]

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        # the ranks of one model-parallel group evaluate the same rows
        by_rank = dict(weights.from_all_ranks((trainer.datamodule.rank, self.sums)))
        if not trainer.is_global_zero:
            return
        import pandas as pd

        columns = dict(zip(("sample", "source", "text", "end"), self.documents, strict=True))
        columns |= zip(("nats", "tokens"), sum(by_rank.values()), strict=True)
        texts = [text.encode() for text in self.documents.texts]
        tokenizer = trainer.datamodule.text_tokenizer.backend_tokenizer.to_str().encode()
        columns["tokenizer"] = hashlib.sha256(tokenizer).hexdigest()
        columns["bytes"] = [len(text) for text in texts]
        hashes = [hashlib.sha256(text).hexdigest()[:16] for text in texts]
        pd.DataFrame(columns, pd.Index(hashes, name="hash")).to_parquet(self.path)

    on_validation_start, on_validation_end = on_test_start, on_test_end
    on_validation_batch_end = on_test_batch_end


class OnnxRows:
    """Runs a graph on packed rows: each document alone, because the graph knows no boundaries."""

    def __init__(self, model: OnnxModel) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> Any:
        rows = []
        for tokens, positions in zip(input_ids, position_ids, strict=True):
            starts = [0, *positions[1:].eq(0).nonzero().flatten().add(1).tolist()]
            parts = tokens[None].tensor_split(starts[1:], dim=1)
            rows.append(torch.cat([self.model(part).logits for part in parts], dim=1))
        return SimpleNamespace(logits=torch.cat(rows))
