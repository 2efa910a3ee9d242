"""PackedText: documents become packed rows of tokens, in an order that any number of ranks can resume.

The way of a text, in the order of this file and of `text/`:

    1  source      files, jsonl, parquet or a hub data set                     text/sources.py
    2  documents   (name, text), one by one
    3  split       train, validation or test, by a hash of the text            text/cache.py
    4  tokens      by bytes, by a BPE learned here, or by a published one      text/tokenizers.py
    5  cache       all documents' tokens in one line, EOS after each           text/encode.py, build.py, cache.py
    6  rows        row i is tokens[i*T : i*T + T + 1], the last at their end   text/rows.py
    7  order       which rows a rank takes next                                text/order.py
    8  batch       input_ids, labels, position_ids                             text/rows.py
    9  its weight  tokens_per_micro_batch: what a sum of losses is divided by  text/weight.py

`prepare` does 1 to 5, once, on one machine; training maps its result into memory and does 6 to 8.

Shapes: B sequences of `micro_batch_size`, T tokens of `seq_len`; ids are int64; a label of -100 does not count.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from ..cluster.signals import isolate_worker
from .build import build_cache
from .cache import CacheError, Corpus, Recipe, open_cache
from .limits import check_numbers, check_rows
from .order import ROWS, WINDOW, ConsumedSamples, EvalOrder, GlobalOrder, Jump, LazyLoader
from .rows import PackedRows
from .sources import Source, StandardLibrary
from .tokenizers import ByteBPE, TokenizerSpec
from .weight import TokensOfRanks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Mapped rows are read faster without workers: a token through one takes some 20 times the CPU (benchmarks/data.py).
warnings.filterwarnings("ignore", message=".*does not have many workers.*")


class PackedText(L.LightningDataModule):
    """Text as packed rows of tokens, resumable to the sample.

    Args:
        source: Where documents come from: StandardLibrary, TextFiles, Jsonl, Parquet, HubDataset, or yours.
        tokenizer: How text becomes tokens: Bytes, ByteBPE (learned from the train split), Pretrained, yours.
        seq_len: Tokens per sequence.
        global_batch_size: Sequences per optimizer step, over all ranks.
        micro_batch_size: Sequences per rank per forward; gradients accumulate up to the global batch.
        validation_share: Share of the documents, below 1, held out for validation. 0 turns validation off.
        test_share: Share of the documents, below 1, held out for `test`. 0 turns it off.
        cache_dir: Folder of the token caches; on a cluster, one that all nodes see.
        check_source: Refuse a cache whose source files have changed. false trains from the cache alone.
        cross_document_attention: true lets tokens attend to earlier documents in their row, which is noise to
            them, and so permits attention kernels that know no boundaries. false keeps documents apart.
        num_workers: Processes per rank that read rows. 0 reads in the training process: faster for text.
        repeat_first_batch: true trains on one global batch over and over: can the model learn? false: off.
        seed: Of the order of rows. Splits do not depend on it.
        prompts: What `predict`, and the sample after each validation, continues. [] turns both off.
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
        self.rank, self.world_size = 0, 1  # of data parallelism, known in `setup`
        self._corpus: Corpus | None = None
        self._consumed: ConsumedSamples | None = None
        self._tokens_of_ranks, self._tokens = TokensOfRanks(), torch.ones(())
        self.fetched_s = 0.0  # when the newest batch came from the loader, by time.perf_counter
        self.window_rows: list[list[int]] = []  # which rows this rank has in the optimizer step, per micro-batch

    # ---- before training -----------------------------------------------------------------------------------

    def check(self, world_size: int) -> None:
        """Refuse numbers that cannot work with `world_size` data-parallel ranks.

        Raises:
            InputError: with all the numbers in it.
        """
        check_numbers(self, world_size)

    def prepare(self, *, report: Callable[[str], None] = print) -> Corpus:
        """Tokenize into the cache, unless it is there already; by one process, before any other is started.

        Raises:
            InputError: the source is missing, empty or unreadable, the disk full, or another at work.
        """
        recipe = self._recipe
        try:
            corpus = open_cache(recipe, self.cache_dir, self.check_source, every_byte=True)
            report(f"tokens are ready in {corpus.folder}")
        except CacheError as error:
            folder = recipe.folder(self.cache_dir)
            report(f"{error}: tokenizing now" if folder.exists() else f"tokenizing into {folder}")
            corpus = build_cache(recipe, self.cache_dir, report)
        report(corpus.describe())
        self._corpus = check_rows(self, corpus)
        return self._corpus

    @property
    def is_prepared(self) -> bool:
        """Whether there is a cache for this configuration, fresh or not."""
        return self._recipe.folder(self.cache_dir).is_dir()

    def require(self) -> Corpus:
        """The prepared cache, for processes that must not tokenize.

        Raises:
            InputError: it is missing, stale or damaged, or too small for one global batch.
        """
        self._corpus = check_rows(self, open_cache(self._recipe, self.cache_dir, self.check_source))
        return self._corpus

    def setup(self, stage: str) -> None:
        """On each rank: open the cache, unless this process just did; learn the rank, derive the accumulation."""
        if self._corpus is None:
            self.require()
        if self.trainer is None:
            return
        dealt = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        self.rank, self.world_size = dealt["rank"], dealt["num_replicas"]
        if stage == "fit":
            self.check(self.world_size)
            self.trainer.accumulate_grad_batches = self.accumulation
            if isinstance(self.trainer.val_check_interval, int):  # in the YAML: optimizer steps, on any number of ranks
                self.trainer.val_check_interval *= self.accumulation
            self._consumed = ConsumedSamples.attach(
                self.trainer, self.global_batch_size, self.micro_batch_size * self.world_size
            )

    # ---- batches -------------------------------------------------------------------------------------------

    def train_dataloader(self) -> DataLoader:
        rows = self._rows("train")
        sizes = (len(rows), self.global_batch_size, self.micro_batch_size, self.rank, self.world_size)
        state = (lambda: self.consumed_samples, self.repeat_first_batch, lambda: self.jumps)
        return self._loader(rows, GlobalOrder(*sizes, self.seed, *state), self.accumulation)

    def transform(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Change a batch on the host: mask labels with -100, add tensors for `forward`. Called before labels count."""
        return batch

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Keep the rows' numbers here on the host: the numerics guard names samples by them."""
        self.fetched_s = time.perf_counter()
        rows = batch.pop(ROWS, [])
        if self.trainer is not None and self.trainer.training:
            self.window_rows = [rows] if WINDOW in batch else [*self.window_rows, rows]
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Add how many tokens count per micro-batch, on average over the global batch and all ranks."""
        if WINDOW in batch:
            tokens = self._tokens_of_ranks.mean(batch.pop(WINDOW), batch["labels"].device)
            self._tokens = (tokens / self.accumulation if self.accumulation > 1 else tokens).clamp(min=1)
        training = self.trainer is not None and self.trainer.training
        return batch | {"tokens_per_micro_batch": self._tokens} if training else batch

    def teardown(self, stage: str) -> None:
        self._tokens_of_ranks.close()

    def val_dataloader(self) -> DataLoader | list:
        return self._eval_loader("validation")

    def test_dataloader(self) -> DataLoader | list:
        return self._eval_loader("test")

    def predict_dataloader(self) -> DataLoader:
        """One prompt at a time, the same on every rank: a sharded model needs all ranks for each token."""
        batches: Any = [
            {"input_ids": torch.tensor([self.text_tokenizer.encode(prompt)]), "prompt": prompt}
            for prompt in self.prompts
        ]
        return DataLoader(batches, batch_size=None)

    def _eval_loader(self, split: str) -> DataLoader | list:
        rows = self._rows(split)
        if not len(rows):
            return []
        return self._loader(rows, EvalOrder(len(rows), self.micro_batch_size, self.rank, self.world_size))

    def _rows(self, split: str) -> PackedRows:
        return PackedRows(self.corpus.tokens(split), self.seq_len, self.eos_token_id, self.cross_document_attention)

    def _loader(self, rows: PackedRows, order: GlobalOrder | EvalOrder, window: int = 0) -> DataLoader:
        """Rows are read an optimizer step ahead (weight.py): copies from memory, while the device is still at work."""
        return LazyLoader(
            rows,
            window,
            self.transform,
            batch_sampler=order,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),  # Lightning copies with non_blocking, which waits if it is not pinned
            persistent_workers=self.num_workers > 0,  # of evaluation: to start them anew takes longer than to evaluate
            worker_init_fn=isolate_worker,
        )

    # ---- resuming ------------------------------------------------------------------------------------------

    @property
    def consumed_samples(self) -> int:
        """Sequences trained on since the run began, over all ranks and restarts."""
        return self._consumed.value(self.trainer) if self._consumed and self.trainer else 0

    @property
    def jumps(self) -> list[Jump]:
        """Intervals of the stream of samples that nobody reads: after a roll back, those that broke training."""
        return self._consumed.jumps if self._consumed else []

    def jump(self, intervals: list[Jump]) -> None:
        """Leave them out, before the first batch; those that have been trained on are not."""
        if self._consumed and self.trainer:
            self._consumed.jump(intervals, self.trainer)

    def state_dict(self) -> dict[str, Any]:
        return self._consumed.as_state(self.trainer) if self._consumed and self.trainer else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._consumed:
            self._consumed.load(state_dict)

    # ---- facts, for the model and the callbacks ---------------------------------------------------------

    @property
    def corpus(self) -> Corpus:
        return self._corpus or self.require()

    @property
    def vocab_size(self) -> int:
        return self.corpus.manifest["vocab_size"]

    @property
    def eos_token_id(self) -> int:
        return self.corpus.manifest["eos_token_id"]

    @property
    def text_tokenizer(self) -> PreTrainedTokenizerFast:
        return self.corpus.tokenizer

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * self.world_size)

    def bytes_per_token(self, split: str) -> float | None:
        """Mean over a split: turns bits per token into bits per byte. None where the split is empty."""
        tokens = self.corpus.num_tokens(split)
        return self.corpus.num_bytes(split) / tokens if tokens else None

    @property
    def unigram_bits_per_byte(self) -> float | None:
        """What knowing only how often each token occurs gives on the validation split: the model to beat."""
        return self.corpus.manifest["unigram_bits_per_byte"]

    @property
    def _recipe(self) -> Recipe:
        return Recipe(self.source, self.tokenizer, self.validation_share, self.test_share)


def _as_it_is(batch: Any) -> Any:
    return batch
