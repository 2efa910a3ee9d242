"""PackedText: a LightningDataModule that packs documents into rows of tokens, in a resumable order.

From a text to a batch:

    1 source     files, jsonl, parquet or a hub data set              sources/documents.py
    2 documents  (name, text), one by one
    3 split      train, validation or test, by a hash of the text     cache/token_cache.py
    4 tokens     bytes, a BPE learned here, a published tokenizer     tokenizers.py
    5 cache      the tokens of all documents, EOS after each          cache/token_cache.py
    6 order      the rows that a rank reads next                      callbacks/global_order.py
    7 rows       row i is tokens[i*T : i*T + T + 1]; B are a batch    batches/rows.py
    8 loader     `transform`; counts labels of an optimizer step      batches/loader.py
    9 batch      input_ids, labels, position_ids and a token count    on_after_batch_transfer

`prepare` does 1 to 5 once, in one process; training maps the cache into memory and does 6 to 9.

Shapes: B sequences of `micro_batch_size`, T tokens of `seq_len`; int64 ids; labels of -100 do not
count."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader

from ..by_tokens import AUTO, Auto, Phase, batch_at, divisor_of, values_of
from ..callbacks.global_order import ConsumedSamples, GlobalOrder, eval_batches, source_of
from ..callbacks.rank_speeds import MeasureSpeeds, RankSpeeds
from ..cluster.signals import isolate_worker
from ..compat.epochs import begin_step, make_resumable
from ..errors import InputError
from ..model.any_module import size_of
from ..parallel import rank_view
from ..ranges import Folder, PositiveFloat, PositiveInt, Range, Seed, ShareBelowOne
from . import auto
from .batches.loader import COUNTED, Accumulations, Counted, StepLoader, TokensPerMicroBatch
from .batches.rows import (
    ATTENTION_TOKENS,
    ROWS,
    PackedRows,
    PairRows,
    Rows,
    WholeRows,
    last_answers,
    packing_of,
)
from .cache.token_cache import (
    SPLITS,
    CacheError,
    Corpus,
    Documents,
    Recipe,
    build_cache,
    open_cache,
    read_documents,
)
from .limits import check_numbers, check_rows
from .model.kernels import BOUNDS
from .objectives.objective import objective_for, objective_of
from .sources import chat  # noqa: F401  (so that YAML knows the names of its sources)
from .sources.documents import Source, StandardLibrary
from .sources.mixture import Mixture, MixtureOrder
from .tokenizers import ByteBPE, TokenizerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer

# Mapped rows are read faster without workers: benchmarks/results/2026-11.md.
warnings.filterwarnings("ignore", message=".*does not have many workers.*")

Batch = dict[str, Any]  # tensors; on the host also the numbers of its rows
# With the source, they decide the samples of a step.
DECISIVE = (
    "seq_len",
    "global_batch_size",
    "seed",
    "cross_document_attention",
    "repeat_first_batch",
    "balance",
    "rank_speeds",
)


@dataclass(eq=False, repr=False)
class PackedText(L.LightningDataModule):
    """Packs text into rows of tokens; a run resumes at the next sample.

    Args:
        source: Where documents come from: StandardLibrary, TextFiles, Jsonl, Parquet, HubDataset,
            Chat, Mixture, yours.
        tokenizer: How text becomes tokens: Bytes, ByteBPE (learned from the train split),
            Pretrained, yours.
        seq_len: Tokens per sequence.
        global_batch_size: Sequences per optimizer step, over all ranks; or phases by consumed
            tokens, in which the accumulation grows. With phases there are no epochs: set
            trainer.max_steps. auto: as many as leave a fine-tuning enough steps, at most 32.
        micro_batch_size: Sequences per rank per forward; gradients accumulate to the global batch.
        validation_share: Share of the documents, below 1, held out for validation. 0 turns it off.
        test_share: Share of the documents, below 1, held out for `test`. 0 turns it off.
        cache_dir: Folder of the token caches; on a cluster, one that all nodes can read.
        check_source: Refuse a cache whose source files have changed. false uses the cache alone.
        cross_document_attention: Let tokens attend to earlier documents in their row, as some
            kernels must.
        num_workers: Processes per rank that read rows. 0, faster for text: the training process.
        balance: Assign the rows of each global batch so that ranks get equal work: attention's
            grows with the squares of documents' lengths. Which rows form a step does not change.
        rank_speeds: Relative speed of each data-parallel rank, such as [1, 1, 0.5, 0.5]: a slow one
            gets fewer rows of each step, a fast one more than micro_batch_size. `measured`: by
            the ranks' own times in the first steps of a run. null: all are equally fast.
        repeat_first_batch: true trains on one global batch repeatedly, which a model must learn.
        seed: Seed of the order of rows. Splits do not depend on it.
        prompts: What `predict`, and the sample after each validation, continue. [] turns both
            off."""

    source: Source = StandardLibrary()
    tokenizer: TokenizerSpec = ByteBPE(vocab_size=2048)
    seq_len: PositiveInt = 256
    global_batch_size: PositiveInt | list[Phase] | Auto = 16
    micro_batch_size: PositiveInt = 8
    validation_share: ShareBelowOne = 0.02
    test_share: ShareBelowOne = 0.02
    cache_dir: Folder = "data_cache"
    check_source: bool = True
    cross_document_attention: bool = False
    num_workers: Annotated[int, Range(ge=0, le=1024)] = 0
    repeat_first_batch: bool = False
    seed: Seed = 0
    prompts: list[str] = field(default_factory=lambda: ["def", "import", "class"])
    balance: bool = False
    rank_speeds: list[PositiveFloat] | Literal["measured"] | None = None

    def __post_init__(self) -> None:
        super().__init__()
        self.rank, self.world_size = 0, 1  # of data parallelism, set in `setup`
        self.changed_settings: list[str] = []  # since the checkpoint, by last_checkpoint
        self.step_samples = 0  # consumed before the present optimizer step
        self.fetched_s = 0.0  # time.perf_counter when the loader returned the newest batch
        self.step_rows: list[list[int]] = []  # this rank's in the optimizer step, per micro-batch
        self.eval_rows: list[int] = []  # this rank's, of the newest evaluated batch
        self.source_name = ""  # of the newest evaluated batch; "": there is one source
        self._corpus: Corpus | None = None
        self._consumed: ConsumedSamples | None = None
        self._mixing: MixtureOrder | None = None  # the order of a mixture's rows
        self._speeds: RankSpeeds | None = None  # of data-parallel ranks, where `rank_speeds` is set
        self._order: GlobalOrder | None = None
        self._attention_tokens: float = ATTENTION_TOKENS
        self._work = 0.0  # see `take_work`
        self._sizes: dict[str, int] = {}  # rows of each source in the split that is evaluated
        self._counted: Counted | None = None  # of the optimizer step that the newest batch starts
        self._tokens, self._tokens_per_micro_batch = TokensPerMicroBatch(), torch.ones(())

    # ---- the token cache -------------------------------------------------------------------------

    def prepare(self, *, report: Callable[[str], None] = print) -> Corpus:
        """Tokenizes into the cache, unless it is there; before any other process is started. Raises
        InputError if the source is missing, empty or unreadable, the disk is full, or another
        process prepares."""
        recipe = self._recipe
        try:
            corpus = open_cache(recipe, self.cache_dir, self.check_source)
            report(f"tokens are ready in {corpus.folder}")
        except CacheError as error:
            folder = recipe.folder(self.cache_dir)
            if folder.exists():
                report(f"{error}: tokenizing now")
            else:
                report(f"tokenizing into {folder}")
            corpus = build_cache(recipe, self.cache_dir, report)
        report(corpus.describe())
        self._corpus = check_rows(self, corpus)
        for split in SPLITS:
            if corpus.is_whole(split):
                report(packing_of(corpus, split, self.seq_len).describe(split))
        return corpus

    def require(self) -> Corpus:
        """Returns the prepared cache, in processes that must not tokenize. Raises InputError if it
        is missing, stale or damaged, or too small for one global batch."""
        self._corpus = check_rows(self, open_cache(self._recipe, self.cache_dir, self.check_source))
        return self._corpus

    @property
    def is_prepared(self) -> bool:
        """Whether there is a cache for this configuration, which may be stale."""
        return self._recipe.folder(self.cache_dir).is_dir()

    @property
    def corpus(self) -> Corpus:
        return self._corpus or self.require()

    @property
    def _recipe(self) -> Recipe:
        return Recipe(self.source, self.tokenizer, self.validation_share, self.test_share)

    @property
    def vocab_size(self) -> int:
        return self.corpus.manifest["vocab_size"]

    @property
    def eos_token_id(self) -> int:
        return self.corpus.manifest["eos_token_id"]

    @property
    def bos_token_id(self) -> int:
        """The token that a text starts with; without one, the end of the text before."""
        start_ids = self.corpus.start_ids
        return start_ids[0] if start_ids else self.eos_token_id

    @property
    def unigram_bits_per_byte(self) -> float | None:
        """Validation bits per byte of a model that only knows how often each token occurs."""
        return self.corpus.manifest["unigram_bits_per_byte"]

    @property
    def label_baselines(self) -> dict[str, float]:
        """What predictors without a model reach on the labels: facts of a run. {}: not known."""
        if isinstance(self.source, Mixture):
            return self.corpus.baselines(self.source.weights)
        return self.corpus.baselines()

    @property
    def text_tokenizer(self) -> Tokenizer:
        return self.corpus.tokenizer

    @property
    def reads_ends(self) -> bool:
        """Whether the last token of a pair's sequence is an input too, for what is learned."""
        return self.reads_ends_for(getattr(self.trainer, "lightning_module", None))

    def reads_ends_for(self, module: Any) -> bool:
        """Returns the same of a module that need not be attached yet."""
        objective = objective_for(module, self)
        return objective is not None and objective.reads_ends

    def bytes_per_token(self, split: str) -> float | None:
        """Returns the mean over a split, for bits per byte; None: empty, or labels are masked."""
        tokens = self.corpus.num_tokens(split)
        if not tokens or self.corpus.is_whole(split):
            return None
        return self.corpus.num_bytes(split) / tokens

    def encode_prompt(self, prompt: str) -> list[int]:
        """Returns the tokens of a prompt; of conversations, with the chat template around it."""
        return self.source.encode_prompt(self.text_tokenizer, prompt)

    def documents(self, split: str) -> Documents:
        """Reads the texts of a split from the source again."""
        return read_documents(self._recipe, self.corpus, split)

    def held_out(self, number: int) -> list[tuple[list[int], list[int]]]:
        """Returns the tokens of validation conversations up to the last answer, and the answer."""
        if not self.corpus.is_whole("validation"):
            return []
        return list(islice(last_answers(self.corpus, "validation", self.seq_len), number))

    def rows_of(self, split: str, reads_ends: bool | None = None) -> Rows:
        """Returns the rows of a split. `reads_ends`: of a module that is not attached yet."""
        corpus, attends = self.corpus, self.cross_document_attention
        if corpus.is_pairs:
            if reads_ends is None:
                reads_ends = self.reads_ends
            return PairRows(corpus, split, self.seq_len, reads_ends=reads_ends)
        if corpus.is_whole(split):
            return WholeRows(corpus, split, self.seq_len, attends)
        parts = {name: counts["tokens"] for name, counts in corpus.parts(split).items()}
        tokens, starts = corpus.tokens(split), corpus.start_ids
        return PackedRows(tokens, self.seq_len, self.eos_token_id, attends, parts, starts)

    # ---- before training -------------------------------------------------------------------------

    @property
    def rows_per_step(self) -> int | list[Phase]:
        """`global_batch_size` in numbers. Raises InputError if it is auto, and nothing was chosen
        yet."""
        if isinstance(self.global_batch_size, str):
            raise InputError(
                "data.global_batch_size auto is chosen by `fit` on the command line: give a number"
            )
        return self.global_batch_size

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """The number that divides every global batch, and the largest one. Of auto, which is chosen
        when the rows are known, the least that there can be."""
        if self.global_batch_size == AUTO:
            return self.micro_batch_size, self.micro_batch_size
        return divisor_of(self.global_batch_size), int(max(values_of(self.global_batch_size)))

    def num_rows(self, module: Any) -> int:
        """Returns the rows of the train split for the module that will be trained."""
        return len(self.rows_of("train", reads_ends=self.reads_ends_for(module)))

    def batch_for(
        self,
        num_rows: int,
        epochs: int | None,
        multiple: int,
        limit: float = 1.0,
        world_size: int = 1,
    ) -> int:
        """Returns what `global_batch_size` auto stands for, a multiple of `multiple`, for those of
        `num_rows` that `limit` leaves of an epoch: trainer.limit_train_batches, as in
        `steps_of_epoch`."""
        passes = epochs if epochs and epochs > 0 else 1  # -1, as null, is without an end
        if not isinstance(limit, int):
            return auto.batch_for(max(1, int(num_rows * limit)), passes, multiple)
        limited = limit * self.micro_batch_size * world_size
        if limited > num_rows:
            return auto.batch_for(num_rows, passes, multiple)
        # an epoch that a number of batches ends has no part of a step: check_numbers
        return auto.batch_for(limited, passes, multiple, divides=True)

    def steps_of_epoch(self, num_rows: int, limit: float, world_size: int) -> int:
        """Returns the optimizer steps of an epoch on `world_size` data-parallel ranks; `limit` is
        trainer.limit_train_batches, a share of the steps or a number of a rank's micro-batches."""
        size, _ = self.batch_sizes
        steps = num_rows // size
        if isinstance(limit, int):
            # only fast_dev_run ends within a step, which Lightning takes with what there is
            return min(steps, -(-limit * self.micro_batch_size * world_size // size))
        if limit >= 1:
            return steps
        return max(1, int(limit * steps))

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step, of growing batches in the present one."""
        size = batch_at(self.rows_per_step, self.step_samples * self.seq_len)
        return size // (self.micro_batch_size * self.world_size)

    def check(self, world_size: int) -> None:
        """Refuses sizes and shares that cannot work on `world_size` data-parallel ranks."""
        check_numbers(self, world_size)

    def fixed_settings(self) -> dict[str, object]:
        """Returns what decides the samples: a resumed run is compared by these."""
        settings: dict[str, object] = {
            "data.source": self.corpus.content(),
            "data.source.weights": getattr(self.source, "weights", None),
        }
        for name in DECISIVE:
            settings[f"data.{name}"] = getattr(self, name)
        return settings

    def setup(self, stage: str) -> None:
        """Opens the cache on each rank, gets the rank of the strategy, derives the accumulation."""
        if self._corpus is None:
            self.require()
        if self.trainer is None:
            return
        self.rank, self.world_size = rank_view(self.trainer.strategy).data_rank
        if stage != "fit":
            return
        self.check(self.world_size)
        check_rows(self, self.corpus)  # `prepare` does not know the module
        self.trainer.accumulate_grad_batches = self.accumulation
        limit = self.trainer.limit_train_batches
        if isinstance(limit, float) and limit < 1:  # of the steps of an epoch
            steps = self.steps_of_epoch(len(self.rows_of("train")), limit, self.world_size)
            self.trainer.limit_train_batches = steps * self.accumulation
        per_batch = self.micro_batch_size * self.world_size
        grows = isinstance(self.global_batch_size, list)
        if grows:
            make_resumable(self.trainer)
            size = per_batch
        else:
            size = per_batch * self.accumulation
            if isinstance(getattr(self.trainer, "val_check_interval", None), int):
                # YAML counts optimizer steps, and Lightning batches
                self.trainer.val_check_interval *= self.accumulation
        self._consumed = ConsumedSamples.attach(self.trainer, size, per_batch)
        self._consumed.grows = grows
        if isinstance(self.source, Mixture):
            sizes = self.rows_of("train").sizes
            self._mixing = MixtureOrder(sizes, [(0, self.source.weights)], self.seed)
            self._consumed.figures = self._mixing.epochs
        self._speeds = None
        if isinstance(self.rank_speeds, str):
            self._speeds = RankSpeeds(self.world_size, None)
            measure = MeasureSpeeds(self._speeds, self._drawn, self._rows_so_far)
            measure.attach(self.trainer)
        elif self.rank_speeds:
            self._speeds = RankSpeeds(self.world_size, self.rank_speeds)

    # ---- batches ---------------------------------------------------------------------------------

    def train_dataloader(self) -> DataLoader:
        rows = self.rows_of("train")
        module = getattr(self.trainer, "lightning_module", None)
        if self.world_size > 1 and module is not None:
            self._attention_tokens = size_of(module).attention_tokens or ATTENTION_TOKENS
        rows.attention_tokens = self._attention_tokens
        self._order = order = GlobalOrder(
            len(rows),
            self.rows_per_step,
            self.micro_batch_size,
            self.rank,
            self.world_size,
            self.seed,
            consumed=lambda: self.consumed_samples,
            repeat_first_batch=self.repeat_first_batch,
            stream=self._mixing,
            seq_len=self.seq_len,
            costs=rows.work if self.balance else None,
            speeds=self._speeds.at if self._speeds else None,
        )
        return self._loader(rows, order, order.accumulations)

    def transform(self, batch: Batch) -> Batch:
        """Returns a changed batch on the host: mask labels with -100, add tensors for `forward`."""
        return batch

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Keeps what is no tensor on the host: the numerics guard names samples by their rows."""
        self.fetched_s = time.perf_counter()
        rows = batch.pop(ROWS, [])
        self._counted = batch.pop(COUNTED, None)  # the batch is only tensors: copied in one loop
        if self._counted is not None:
            self.step_samples = self.consumed_samples
            if isinstance(self.global_batch_size, list):
                begin_step(self.trainer, self._counted.step[1])
        if self.trainer is not None and self.trainer.training:
            if self.world_size > 1:
                self._work += _work_of(batch, self._attention_tokens)
            if self._counted is None:
                self.step_rows = [*self.step_rows, rows]
            else:  # a step starts
                self.step_rows = [rows]
        elif rows:
            self.eval_rows = rows
            self.source_name = source_of(self._sizes, rows[0])
        return batch

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Adds `tokens_per_micro_batch`, by which a training step divides its sum of losses."""
        if self._counted is not None:
            device = batch["labels"].device
            self._tokens_per_micro_batch = self._tokens.of(self._counted, device)
        module = getattr(self.trainer, "lightning_module", None)
        objective = objective_of(module)
        if objective is not None and "labels" in batch:
            batch = objective.extend_batch(module, batch)
        if self.trainer is None or not self.trainer.training:
            return batch
        return batch | {"tokens_per_micro_batch": self._tokens_per_micro_batch}

    def take_work(self) -> float:
        """Returns the work of this rank's batches since the last call, in tokens: attention's grows
        with the squares of documents' lengths."""
        work, self._work = self._work, 0.0
        return work

    def _drawn(self) -> int:
        return self._order.drawn if self._order else 0

    def _rows_so_far(self) -> int:
        return sum(map(len, self.step_rows))

    def teardown(self, stage: str) -> None:
        self._tokens.close()

    def val_dataloader(self) -> DataLoader | list:
        return self._eval_loader("validation")

    def test_dataloader(self) -> DataLoader | list:
        return self._eval_loader("test")

    def predict_dataloader(self) -> DataLoader:
        """One prompt a batch, the same on all ranks, which a sharded model needs for each token."""
        batches: Any = []  # a list is a Dataset, which ty does not see
        for prompt in self.prompts:
            ids = torch.tensor([self.encode_prompt(prompt)])
            batches.append({"input_ids": ids, "prompt": prompt})
        return DataLoader(batches, batch_size=None)

    def _eval_loader(self, split: str) -> DataLoader | list:
        rows = self.rows_of(split)
        if not len(rows):
            return []
        self._sizes = rows.sizes
        batches = eval_batches(rows.sizes, self.micro_batch_size, self.rank, self.world_size)
        return self._loader(rows, batches, None)

    def _loader(
        self, rows: Rows, order: Iterable[list[int]], accumulations: Accumulations | None
    ) -> DataLoader:
        is_on_gpu = bool(self.trainer) and self.trainer.strategy.root_device.type == "cuda"
        return StepLoader(
            rows,
            accumulations,
            self.transform,
            batch_sampler=order,
            num_workers=self.num_workers,
            # from unpinned memory, non-blocking copies wait
            pin_memory=is_on_gpu,
            # starting workers for each evaluation takes longer than evaluating
            persistent_workers=self.num_workers > 0,
            worker_init_fn=isolate_worker,
        )

    # ---- resuming --------------------------------------------------------------------------------

    @property
    def consumed_samples(self) -> int:
        """Sequences trained on since the run started, over all ranks and restarts."""
        if not self._consumed or not self.trainer:
            return 0
        return self._consumed.value(self.trainer)

    def state_dict(self) -> dict[str, Any]:
        if not self._consumed or not self.trainer:
            return {}
        state = self._consumed.as_state(self.trainer)
        if self._mixing:
            state["mixture"] = self._mixing.changes
        if self._speeds and self._speeds.is_measured:
            state["rank_speeds"] = self._speeds.changes
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._consumed:
            self._consumed.load(state_dict)
        if self._speeds:
            self._speeds.load(state_dict.get("rank_speeds", []))
        if {"data.source", "data.seq_len"}.intersection(self.changed_settings):
            return  # other rows: a mixture has the present weights
        if self._mixing and "mixture" in state_dict:
            self._mixing.resume(state_dict["mixture"], state_dict["consumed_samples"])


def _work_of(batch: Batch, attention_tokens: float) -> float:
    """Returns the work of a batch, in tokens, as `Rows.work` has it of its rows."""
    if "input_ids" not in batch:  # a changed batch, which `transform` returned
        return 0.0
    squares = 0.0
    if BOUNDS in batch:
        lengths = np.diff(batch[BOUNDS].numpy())
        squares = float(np.square(lengths, dtype=np.float64).sum())
    return batch["input_ids"].numel() + squares / attention_tokens
