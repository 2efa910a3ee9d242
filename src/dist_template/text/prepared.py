"""PreparedText: the part of a data module that tokenizes once and opens the token cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .batches.packing import PairRows, WholeRows, packing_of, second_start
from .batches.rows import PackedRows, Rows
from .cache.build import Documents, build_cache, read_documents
from .cache.quality import as_table, data_statistics, quality_of, stored
from .cache.token_cache import SPLITS, CacheError, Corpus, Recipe, open_cache
from .limits import check_rows
from .sources.chat_template import last_turn
from .sources.documents import Source
from .sources.stream import TextStream
from .tokenizers import TokenizerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# With the source and the stream, they decide the samples of a step.
DECISIVE = (
    "seq_len", "global_batch_size", "seed", "cross_document_attention", "repeat_first_batch",
    "balance",
)  # fmt: skip


class PreparedText:
    """Base class of PackedText, which describes these attributes."""

    source: Source
    tokenizer: TokenizerSpec
    seq_len: int
    validation_share: float
    test_share: float
    cache_dir: str
    check_source: bool
    stream: TextStream | None = None
    cross_document_attention: bool
    _corpus: Corpus | None = None
    reference_scores: dict[str, Any] | None = None  # by split, of model.preference.precompute

    def prepare(self, *, report: Callable[[str], None] = print) -> Corpus:
        """Tokenizes into the cache, unless it is there. One process calls it before any other is
        started.

        Raises:
            InputError: the source is missing, empty or unreadable, the disk is full, or another
                process prepares.
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
        for split in filter(corpus.is_whole, SPLITS):
            report(packing_of(corpus, split, self.seq_len).describe(split))
        report(as_table(quality_of(corpus), "Quality of the train split").as_text())
        return self._corpus

    def fixed_settings(self) -> dict[str, Any]:
        """Returns what decides the samples: a resumed run is compared by these."""
        manifest, source = self.corpus.manifest, self.source
        content = json.dumps([manifest["splits"], manifest.get("parts")], sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        return {
            "data.source": f"{self.corpus.num_tokens('train'):,} tokens with SHA-256 {digest}",
            "data.source.weights": getattr(source, "weighting", None),
            "data.stream": self.stream and self.stream.description(),
            **{f"data.{name}": getattr(self, name) for name in DECISIVE},
        }

    @property
    def is_prepared(self) -> bool:
        """Whether there is a cache for this configuration, which may be stale."""
        return self._recipe.folder(self.cache_dir).is_dir()

    def require(self) -> Corpus:
        """Returns the prepared cache, in processes that must not tokenize.

        Raises:
            InputError: it is missing, stale or damaged, or too small for one global batch.
        """
        self._corpus = check_rows(self, open_cache(self._recipe, self.cache_dir, self.check_source))
        return self._corpus

    def is_trained_on(self, text: str) -> bool:
        """Returns whether a document is in the train split, and not held out."""
        return self._recipe.split_of(text) == "train"

    @property
    def corpus(self) -> Corpus:
        return self._corpus or self.require()

    def statistics(self) -> dict[str, Any]:
        """Returns the figures of the data that `facts.json` of a run has."""
        return data_statistics(self) | {"quality": stored(self.corpus)}

    @property
    def vocab_size(self) -> int:
        return self.corpus.manifest["vocab_size"]

    @property
    def eos_token_id(self) -> int:
        return self.corpus.manifest["eos_token_id"]

    @property
    def text_tokenizer(self) -> PreTrainedTokenizerFast:
        return self.corpus.tokenizer

    def encode_prompt(self, prompt: str) -> list[int]:
        """Returns the tokens of a prompt; of conversations, with the chat template around it."""
        return self.source.encode_prompt(self.text_tokenizer, prompt)

    def documents(self, split: str) -> Documents:
        """Reads the texts of a split from the source again: the cache holds tokens alone."""
        return read_documents(self._recipe, self.corpus, split)

    def held_out(self, number: int) -> list[tuple[list[int], list[int]]]:
        """Returns the tokens of validation conversations up to the last answer, and the answer.

        Those that fill a sequence are skipped. Plain text has none, and where all tokens are
        trained on, no answer is known.
        """
        corpus, found = self.corpus, []
        if not corpus.is_whole("validation"):
            return []
        starts, counted = corpus.starts("validation"), corpus.counted("validation")
        for start, end in zip(starts, starts[1:], strict=False):
            if corpus.is_pairs:  # of which the chosen answer is the reference
                end = start + second_start(counted[start:end])
            tokens = corpus.tokens("validation")[start:end].tolist()
            answer, answer_end = last_turn(counted[start:end])
            if len(found) == number:
                break
            if 0 < answer < self.seq_len:
                found.append((tokens[:answer], tokens[answer:answer_end]))
        return found

    def bytes_per_token(self, split: str) -> float | None:
        """Returns the mean over a split, for bits per byte; None: empty, or labels are masked."""
        tokens = 0 if self.corpus.is_whole(split) else self.corpus.num_tokens(split)
        return self.corpus.num_bytes(split) / tokens if tokens else None

    def rows_of(self, split: str) -> Rows:
        if self.corpus.is_pairs:
            rows = PairRows(self.corpus, split, self.seq_len)
            rows.scores = (self.reference_scores or {}).get(split)
            return rows
        if self.corpus.is_whole(split):
            return WholeRows(self.corpus, split, self.seq_len, self.cross_document_attention)
        return PackedRows(
            self.corpus.tokens(split),
            self.seq_len,
            self.eos_token_id,
            self.cross_document_attention,
            {name: counts["tokens"] for name, counts in self.corpus.parts(split).items()},
        )

    @property
    def unigram_bits_per_byte(self) -> float | None:
        """Validation bits per byte of a model that only knows how often each token occurs."""
        return self.corpus.manifest["unigram_bits_per_byte"]

    @property
    def _recipe(self) -> Recipe:
        return Recipe(self.source, self.tokenizer, self.validation_share, self.test_share)
