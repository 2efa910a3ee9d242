"""PackedText: a LightningDataModule that packs documents into rows of tokens, in a resumable order.

From a text to a batch:

    1 source     files, jsonl, parquet or a hub data set                    sources/documents.py
    2 documents  (name, text), one by one
    3 split      train, validation or test, by a hash of the text           cache/token_cache.py
    4 tokens     bytes, a BPE learned here, or a published tokenizer        tokenizers.py
    5 cache      the tokens of all documents, EOS after each                cache/build.py
    6 order      the rows that a rank reads next                            batches/order.py
    7 rows       row i is tokens[i*T : i*T + T + 1]; a batch is B of them   batches/rows.py
    8 loader     `transform`; counts the labels of an optimizer step        batches/loader.py
    9 batch      input_ids, labels, position_ids, tokens_per_micro_batch    on_after_batch_transfer

`prepare` does 1 to 5 once, in one process; training maps the cache into memory and does 6 to 9.

Shapes: B sequences of `micro_batch_size`, T tokens of `seq_len`; int64 ids; labels of -100 do not
count.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from ..cluster.signals import isolate_worker
from ..parallel import run_strategy
from ..weights import from_all_ranks
from .batches.loader import COUNTED, Counted, StepLoader, TokensPerMicroBatch
from .batches.order import (
    ConsumedSamples,
    GlobalOrder,
    Jump,
    eval_batches,
    source_of,
    stream_position,
)
from .batches.rows import ROWS, Rows
from .cache.token_cache import Corpus
from .limits import check_numbers
from .prepared import PreparedText
from .sources import chat, preferences  # noqa: F401  (so that YAML knows the names of their sources)
from .sources.documents import Source, StandardLibrary
from .sources.mixture import Mixture, MixtureOrder
from .sources.stream import STATE, StreamedRows, TextStream, own_state
from .tokenizers import ByteBPE, TokenizerSpec

# Mapped rows are read faster without workers: benchmarks/data.py.
warnings.filterwarnings("ignore", message=".*does not have many workers.*")


class PackedText(PreparedText, L.LightningDataModule):
    """Packs text into rows of tokens; a run resumes at the next sample.

    Args:
        source: Where documents come from: StandardLibrary, TextFiles, Jsonl, Parquet, HubDataset,
            Chat, Mixture, yours.
        tokenizer: How text becomes tokens: Bytes, ByteBPE (learned from the train split),
            Pretrained, yours.
        seq_len: Tokens per sequence.
        global_batch_size: Sequences per optimizer step, over all ranks.
        micro_batch_size: Sequences per rank per forward; gradients accumulate to the global batch.
        validation_share: Share of the documents, below 1, held out for validation. 0 turns it off.
        test_share: Share of the documents, below 1, held out for `test`. 0 turns it off.
        cache_dir: Folder of the token caches; on a cluster, one that all nodes can read.
        check_source: Refuse a cache whose source files have changed. false uses the cache alone.
        cross_document_attention: Let tokens attend to earlier documents in their row, as some
            kernels must.
        num_workers: Processes per rank that read rows. 0, faster for text: the training process.
        balance: Assign the rows of each global batch so that all ranks get equal work: rows have
            equally many tokens, and attention's work grows with the squares of documents' lengths.
            The rows of a step do not change.
        rank_speeds: Relative speed of each data-parallel rank, such as [1, 1, 0.5, 0.5]: a slow one
            gets fewer rows. null: all are equally fast.
        repeat_first_batch: true trains on one global batch repeatedly, which a model must learn.
        seed: Seed of the order of rows. Splits do not depend on it.
        stream: A train split that is read and tokenized while training: TextStream. null: train on
            `source`.
        prompts: What `predict`, and the sample after each validation, continue. [] turns both off.
    """

    def __init__(
        self,
        source: Source = StandardLibrary(),  # noqa: B008  (nothing changes it)
        tokenizer: TokenizerSpec = ByteBPE(vocab_size=2048),  # noqa: B008
        seq_len: int = 256,
        global_batch_size: int = 16,
        micro_batch_size: int = 8,
        validation_share: float = 0.02,
        test_share: float = 0.02,
        cache_dir: str = "data_cache",
        check_source: bool = True,
        cross_document_attention: bool = False,
        num_workers: int = 0,
        repeat_first_batch: bool = False,
        seed: int = 0,
        prompts: list[str] = ["def", "import", "class"],  # noqa: B006
        balance: bool = False,
        rank_speeds: list[float] | None = None,
        stream: TextStream | None = None,
    ) -> None:
        super().__init__()
        self.source = source
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.validation_share = validation_share
        self.test_share = test_share
        self.cache_dir = cache_dir
        self.check_source = check_source
        self.cross_document_attention = cross_document_attention
        self.num_workers = num_workers
        self.repeat_first_batch = repeat_first_batch
        self.seed = seed
        self.prompts = prompts
        self.balance = balance
        self.rank_speeds = rank_speeds
        self.stream = stream
        self._stream_state: dict[str, Any] = {}  # this rank's, after the newest batch
        self.changed_settings: list[str] = []  # since the checkpoint, by last_checkpoint
        self.rank, self.world_size = 0, 1  # of data parallelism, set in `setup`
        self._corpus: Corpus | None = None
        self._consumed: ConsumedSamples | None = None
        self._tokens, self._tokens_per_micro_batch = TokensPerMicroBatch(), torch.ones(())
        self._counted: Counted | None = None  # of the optimizer step that the newest batch starts
        self.fetched_s = 0.0  # time.perf_counter when the loader returned the newest batch
        self._mixing: MixtureOrder | None = None  # the order of a mixture's rows
        self._sizes: dict[str, int] = {}  # rows of each source in the split that is evaluated
        self.source_name = ""  # of the newest evaluated batch; "": there is one source
        self.step_rows: list[list[int]] = []  # this rank's in the optimizer step, per micro-batch
        self.eval_rows: list[int] = []  # this rank's, of the newest evaluated batch

    # ---- before training -------------------------------------------------------------------------

    def check(self, world_size: int) -> None:
        """Checks the sizes and shares for `world_size` data-parallel ranks.

        Raises:
            InputError: they cannot work together; the message has all of them.
        """
        check_numbers(self, world_size)

    def setup(self, stage: str) -> None:
        """Opens the cache on each rank, gets the rank of the strategy, derives the accumulation."""
        if self._corpus is None:
            self.require()
        if self.trainer is None:
            return
        self.rank, self.world_size = run_strategy(self.trainer.strategy).data_rank
        if stage == "fit":
            self.check(self.world_size)
            self.trainer.accumulate_grad_batches = self.accumulation
            # optimizer steps in YAML, batches in Lightning
            if isinstance(self.trainer.val_check_interval, int):
                self.trainer.val_check_interval *= self.accumulation
            self._consumed = ConsumedSamples.attach(
                self.trainer, self.global_batch_size, self.micro_batch_size * self.world_size
            )
            if isinstance(self.source, Mixture):
                sizes, corpus = self.rows_of("train").sizes, self.corpus
                self._mixing = self.source.order(sizes, corpus, self.global_batch_size, self.seed)
                self._consumed.figures = self._mixing.epochs

    # ---- batches ---------------------------------------------------------------------------------

    def train_dataloader(self) -> DataLoader:
        if self.stream:
            batches = StreamedRows(self, lambda: self._stream_state)
            options: dict[str, Any] = {"batch_size": None, "collate_fn": _unchanged}
            return StepLoader(batches, self.accumulation, self.transform, **options)
        rows = self.rows_of("train")
        order = GlobalOrder(
            len(rows), self.global_batch_size, self.micro_batch_size,
            self.rank, self.world_size, self.seed, consumed=lambda: self.consumed_samples,
            repeat_first_batch=self.repeat_first_batch, jumps=lambda: self.jumps,
            costs=rows.work if self.balance else None,
            speeds=self.rank_speeds, stream=self._mixing,
        )  # fmt: skip
        return self._loader(rows, order, self.accumulation)

    def transform(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns a changed batch on the host: mask labels with -100, add tensors for `forward`."""
        return batch

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Keeps what is no tensor on the host: the numerics guard names samples by their rows."""
        self.fetched_s = time.perf_counter()
        rows = batch.pop(ROWS, [])
        self._counted = batch.pop(COUNTED, None)  # the batch is only tensors: copied in one loop
        self._stream_state = batch.pop(STATE, self._stream_state)
        if self.trainer is not None and self.trainer.training:
            self.step_rows = [rows] if self._counted else [*self.step_rows, rows]
        elif rows:
            self.eval_rows = rows
            self.source_name = source_of(self._sizes, rows[0])
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Adds `tokens_per_micro_batch`, by which a training step divides its sum of losses."""
        if self._counted:
            device = batch["labels"].device
            self._tokens_per_micro_batch = self._tokens.of(self._counted, self.accumulation, device)
        if self.trainer is None or not self.trainer.training:
            return batch
        return batch | {"tokens_per_micro_batch": self._tokens_per_micro_batch}

    def teardown(self, stage: str) -> None:
        self._tokens.close()

    def val_dataloader(self) -> DataLoader | list:
        return self._eval_loader("validation")

    def test_dataloader(self) -> DataLoader | list:
        return self._eval_loader("test")

    def predict_dataloader(self) -> DataLoader:
        """One prompt a batch, equal on all ranks: sharded models need all ranks for each token."""
        batches: list[Any] = []
        for prompt in self.prompts:
            ids = torch.tensor([self.encode_prompt(prompt)])
            batches.append({"input_ids": ids, "prompt": prompt})
        return DataLoader(batches, batch_size=None)  # ty: ignore[invalid-argument-type]

    def _eval_loader(self, split: str) -> DataLoader | list:
        rows = self.rows_of(split)
        if not len(rows):
            return []
        self._sizes = rows.sizes
        batches = eval_batches(rows.sizes, self.micro_batch_size, self.rank, self.world_size)
        return self._loader(rows, batches, 0)

    def _loader(self, rows: Rows, order: Iterable[list[int]], accumulation: int) -> DataLoader:
        is_on_gpu = bool(self.trainer) and self.trainer.strategy.root_device.type == "cuda"
        return StepLoader(
            rows,
            accumulation,
            self.transform,
            batch_sampler=order,
            collate_fn=_unchanged,
            num_workers=self.num_workers,
            pin_memory=is_on_gpu,  # from unpinned memory, non-blocking copies wait
            # starting workers for each evaluation takes longer than evaluating
            persistent_workers=self.num_workers > 0,
            worker_init_fn=isolate_worker,
        )

    # ---- resuming --------------------------------------------------------------------------------

    @property
    def consumed_samples(self) -> int:
        """Sequences trained on since the run started, over all ranks and restarts."""
        return self._consumed.value(self.trainer) if self._consumed and self.trainer else 0

    @property
    def jumps(self) -> list[Jump]:
        """Stream intervals that no rank reads: after a rollback, those that made it diverge."""
        return self._consumed.jumps if self._consumed else []

    def jump(self, intervals: list[Jump]) -> None:
        """Skips intervals of the stream not read yet. Call it before the first batch is read."""
        if self.stream and intervals:
            self.stream.refuse_jumps()
        if self._consumed and self.trainer:
            self._consumed.jump(intervals, self.trainer)

    def state_dict(self) -> dict[str, Any]:
        state = self._consumed.as_state(self.trainer) if self._consumed and self.trainer else {}
        if state and self.stream:
            state[STATE] = from_all_ranks(self._stream_state)
        return state | ({"mixture": self._mixing.changes} if state and self._mixing else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._consumed:
            self._consumed.load(state_dict)
        if {"data.source", "data.stream", "data.seq_len"}.intersection(self.changed_settings):
            return  # other rows: a stream starts again, a mixture has the present weights
        if self.stream and (states := state_dict.get(STATE)):
            self._stream_state = own_state(states, self.trainer)
        if self._mixing and "mixture" in state_dict:
            consumed, jumps = state_dict["consumed_samples"], state_dict["jumps"]
            self._mixing.resume(state_dict["mixture"], stream_position(consumed, jumps))

    # ---- facts, for the model and the callbacks --------------------------------------------------

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * self.world_size)


def _unchanged(batch: Any) -> Any:
    return batch
