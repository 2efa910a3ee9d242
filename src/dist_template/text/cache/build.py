"""Builds the token cache: documents to splits to tokens to files, in one process and in bounded
memory.

`tokenizers` encodes on all cores by its own threads. The cache is written into a temporary folder,
which is renamed when it is complete; an older cache stays until then.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ...errors import InputError, is_disk_full
from ...records import sha256
from ..sources.documents import Encoded, Source
from .token_cache import CHECKSUMS, SPLITS, Corpus, Recipe, fingerprint

REPORT_S = 10  # between two lines of progress
BATCH_CHARACTERS = 2**20  # encoded together: a fraction of a second, some ten MB of memory


def build_cache(recipe: Recipe, cache_dir: str, report: Callable[[str], None]) -> Corpus:
    """Tokenizes into a new cache, which replaces an older one of the same recipe.

    Raises:
        InputError: another process is building it, the disk is full, or the source is unreadable or
            empty.
    """
    folder = recipe.folder(cache_dir)
    temporary = folder.with_name(folder.name + ".tmp")
    with _locked(folder):
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        try:
            temporary.mkdir()
            manifest = _write(recipe, temporary, report)
            _publish(temporary, folder)
        except Exception as error:
            if is_disk_full(error):
                raise InputError(
                    f"the disk of data.cache_dir {cache_dir!r} is full and nothing was kept: free"
                    " space or name another folder"
                ) from error
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return Corpus(folder, manifest)


def _write(recipe: Recipe, folder: Path, report: Callable[[str], None]) -> dict[str, Any]:
    # before reading: a later change makes the cache stale
    files = [fingerprint(path) for path in recipe.files()]
    tokenizer = recipe.tokenizer.fit(
        text for _, text in _documents(recipe.source) if recipe.split_of(text) == "train"
    )
    tokenizer = recipe.source.prepare_tokenizer(tokenizer)
    tokenizer.save_pretrained(folder / "tokenizer")
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    kinds = CHECKSUMS if recipe.source.whole else ("bin",)
    with ExitStack() as stack:
        writers = {
            split: _SplitWriter(folder / split, len(tokenizer), dtype, kinds, stack)
            for split in SPLITS
        }
        parts = {}
        for name, source in recipe.source.parts().items():
            before = {split: writer.counted for split, writer in writers.items()}
            _write_tokens(recipe, source, tokenizer, writers, report)
            parts[name] = {
                split: {key: held - before[split][key] for key, held in writer.counted.items()}
                for split, writer in writers.items()
            }
        splits = {split: writer.finish() for split, writer in writers.items()}
    unigram = unigram_bits_per_byte(writers["train"].counts, writers["validation"])
    manifest = {
        "spec": recipe.spec(),
        "dtype": dtype.name,
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "splits": splits,
        **({} if "" in parts else {"parts": parts}),  # of a mixture, one after another
        "pairs": recipe.source.pairs,
        # where only some labels count, a loss per byte of text has no meaning
        "unigram_bits_per_byte": None if recipe.source.whole else unigram,
        "tokenizer": {path.name: sha256(path) for path in sorted((folder / "tokenizer").iterdir())},
        "files": files,
    }
    text = json.dumps(manifest, indent=1, default=str)
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    return manifest


def _write_tokens(
    recipe: Recipe,
    source: Source,
    tokenizer: Any,
    writers: dict[str, _SplitWriter],
    report: Callable[[str], None],
) -> None:
    started = reported = time.monotonic()
    for documents in _batches(_documents(source)):
        parts: dict[str, list[Encoded]] = {split: [] for split in SPLITS}
        encoded = source.encode(recipe.tokenizer, tokenizer, documents)
        for (_, text), tokens in zip(documents, encoded, strict=True):
            split = recipe.split_of(text)
            parts[split].append(tokens)
            writers[split].bytes += len(text.encode())
        for split, writer in writers.items():
            writer.add(parts[split])
        now = time.monotonic()
        if now - reported > REPORT_S:
            reported, tokens = now, sum(writer.tokens for writer in writers.values())
            report(f"  {tokens:,} tokens, {tokens / (now - started):,.0f} per second")


class _SplitWriter:
    """Writes one split's files, `path` with a suffix for each kind, and counts what is in them."""

    def __init__(
        self, path: Path, vocab_size: int, dtype: np.dtype, kinds: Iterable[str], stack: ExitStack
    ) -> None:
        self.documents = self.bytes = self.tokens = 0  # bytes of UTF-8 text
        self.counts = np.zeros(vocab_size, dtype=np.int64)  # of each token
        self._lengths: list[np.ndarray] = [np.zeros(1, dtype=np.int64)]  # of the documents
        self._dtype = dtype
        self._files: dict[str, BinaryIO] = {
            kind: stack.enter_context(path.with_suffix(f".{kind}").open("wb")) for kind in kinds
        }
        self._sha256 = {kind: hashlib.sha256() for kind in kinds}

    def add(self, documents: list[Encoded]) -> None:
        ids = np.concatenate([np.zeros(0, dtype=np.int64), *(one.ids for one in documents)])
        self._write("bin", ids.astype(self._dtype))
        self.counts += np.bincount(ids, minlength=len(self.counts))
        self.tokens += len(ids)
        self.documents += len(documents)
        if "counted" in self._files:
            self._lengths.append(np.array([len(one.ids) for one in documents], dtype=np.int64))
            for ids, counted in documents:
                counted = np.ones_like(ids) if counted is None else counted
                self._write("counted", counted.astype(np.uint8))

    def finish(self) -> dict[str, Any]:
        """Returns the split's entry in the manifest, when its files are on the disk."""
        if "starts" in self._files:
            self._write("starts", np.cumsum(np.concatenate(self._lengths)))
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        checksums = {CHECKSUMS[kind]: hashed.hexdigest() for kind, hashed in self._sha256.items()}
        return self.counted | checksums

    @property
    def counted(self) -> dict[str, int]:
        return {"documents": self.documents, "bytes": self.bytes, "tokens": self.tokens}

    def _write(self, kind: str, values: np.ndarray) -> None:
        data = values.tobytes()
        self._files[kind].write(data)
        self._sha256[kind].update(data)


def unigram_bits_per_byte(train_counts: np.ndarray, validation: _SplitWriter) -> float | None:
    """Returns validation bits per byte of a model of token frequencies alone (counts plus one)."""
    if not validation.bytes:
        return None
    probabilities = (train_counts + 1) / (train_counts.sum() + len(train_counts))
    return float(-(validation.counts * np.log2(probabilities)).sum() / validation.bytes)


def _documents(source: Source) -> Iterator[tuple[str, str]]:
    """Yields the documents: no empty ones, no lone surrogates (UTF-8 cannot encode them)."""
    found = False
    for name, text in source.documents():
        if text.strip():
            found = True
            yield name, text.encode(errors="replace").decode()
    if not found:
        raise InputError(
            f"data.source {type(source).__name__} has no text in it: point it at other files"
        )


class Documents(NamedTuple):
    """The documents of a split: names, sources ("" if there is one), texts, ends in its tokens."""

    names: list[str]
    sources: list[str]
    texts: list[str]
    ends: np.ndarray


def read_documents(recipe: Recipe, corpus: Corpus, split: str) -> Documents:
    """Reads the texts of a split from the source: the cache holds tokens alone."""
    # no text has the token that ends a document (tokenizers.py)
    ends = np.flatnonzero(corpus.tokens(split) == corpus.manifest["eos_token_id"]) + 1
    found = Documents([], [], [], corpus.starts(split)[1:] if corpus.is_whole(split) else ends)
    for part, source in recipe.source.parts().items():
        for name, text in _documents(source):
            if recipe.split_of(text) == split:
                for column, value in zip(found[:3], (name, part, text), strict=True):
                    column.append(value)
    if len(found.texts) != len(found.ends):
        raise InputError(f"data.source is not that of {corpus.folder}: run `prepare` again")
    return found


def _batches(documents: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    characters = 0
    for name, text in documents:
        batch.append((name, text))
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _publish(temporary: Path, folder: Path) -> None:
    """Renames the new cache to its name; processes that mapped an older one keep reading that."""
    older = folder.with_name(folder.name + ".old")
    shutil.rmtree(older, ignore_errors=True)
    if folder.exists():
        folder.rename(older)
    temporary.rename(folder)
    shutil.rmtree(older, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Holds the cache's lock; the system releases it when this process exits for any reason."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(folder.name + ".lock").open("w")
    except OSError as error:
        raise InputError(
            f"data.cache_dir {str(folder.parent)!r} cannot be written: {error.strerror}"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another `prepare` is filling {folder} right now: wait until it is done"
            ) from None
        yield
