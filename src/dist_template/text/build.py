"""Fill the token cache: documents to splits to tokens to files, by one process and its helpers, in bounded memory.

It is written beside its place and renamed when complete: there is a whole cache or none, and an older one
stays until the new one is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import InputError, is_disk_full
from .cache import SPLITS, Corpus, Recipe, fingerprint, sha256
from .encode import Encoded, Encoder, encode

REPORT_S = 10  # between two lines of progress


def build_cache(recipe: Recipe, cache_dir: str, report: Callable[[str], None]) -> Corpus:
    """Tokenize into a new cache, in place of an older one of the same recipe.

    Raises:
        InputError: another process is at it, the disk is full, or the source is unreadable or empty.
    """
    folder = recipe.folder(cache_dir)
    temporary = folder.with_name(folder.name + ".tmp")
    with _alone(folder):
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        try:
            temporary.mkdir()
            manifest = _write(recipe, temporary, report)
            _publish(temporary, folder)
        except Exception as error:
            if is_disk_full(error):
                raise InputError(
                    f"the disk of data.cache_dir {cache_dir!r} is full and nothing was kept: free space or"
                    " name another folder"
                ) from error
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return Corpus(folder, manifest)


def _write(recipe: Recipe, folder: Path, report: Callable[[str], None]) -> dict[str, Any]:
    files = [fingerprint(path) for path in recipe.files()]  # before reading: a change meanwhile shows as stale
    tokenizer = recipe.tokenizer.fit(text for text in _texts(recipe) if recipe.split_of(text) == "train")
    tokenizer.save_pretrained(folder / "tokenizer")
    assert tokenizer.eos_token_id is not None
    encoder = Encoder(recipe, tokenizer)
    with contextlib.ExitStack() as stack:
        writers = {split: _SplitWriter(folder, split, len(tokenizer)) for split in SPLITS}
        for writer in writers.values():
            stack.enter_context(contextlib.closing(writer.file))
        encoded = stack.enter_context(contextlib.closing(encode(encoder, _texts(recipe))))
        started = reported = time.monotonic()
        for batch in encoded:
            for split, writer in writers.items():
                writer.add(batch[split])
            if (now := time.monotonic()) - reported > REPORT_S:
                reported, tokens = now, sum(writer.tokens for writer in writers.values())
                report(f"  {tokens:,} tokens, {tokens / (now - started):,.0f} per second")
        for writer in writers.values():
            writer.finish()
    manifest = {
        "spec": recipe.spec(),
        "dtype": encoder.dtype.name,
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "splits": {split: writer.summary() for split, writer in writers.items()},
        "unigram_bits_per_byte": unigram_bits_per_byte(writers["train"].counts, writers["validation"]),
        "tokenizer": {path.name: sha256(path) for path in sorted((folder / "tokenizer").iterdir())},
        "files": files,
    }
    with (folder / "manifest.json").open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1, default=str)
        file.flush()
        os.fsync(file.fileno())
    return manifest


class _SplitWriter:
    """One split's file, and what is counted while it is written."""

    def __init__(self, folder: Path, split: str, vocab_size: int) -> None:
        self.documents = self.bytes = self.tokens = 0
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.file: BinaryIO = (folder / f"{split}.bin").open("wb")
        self._sha256 = hashlib.sha256()

    def add(self, encoded: Encoded) -> None:
        data = encoded.ids.tobytes()
        self.file.write(data)
        self._sha256.update(data)
        self.counts += np.bincount(encoded.ids, minlength=len(self.counts))
        self.documents += encoded.documents
        self.bytes += encoded.bytes
        self.tokens += len(encoded.ids)

    def finish(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def summary(self) -> dict[str, Any]:
        counted = {"documents": self.documents, "bytes": self.bytes, "tokens": self.tokens}
        return {**counted, "sha256": self._sha256.hexdigest()}


def unigram_bits_per_byte(train_counts: np.ndarray, validation: _SplitWriter) -> float | None:
    """What a model that knows only how often each token occurs, none never, needs on the validation split."""
    if not validation.bytes:
        return None
    probabilities = (train_counts + 1) / (train_counts.sum() + len(train_counts))
    return float(-(validation.counts * np.log2(probabilities)).sum() / validation.bytes)


def _texts(recipe: Recipe) -> Iterator[str]:
    """Of the documents; no empty ones, no lone surrogates, which UTF-8 cannot hold."""
    found = False
    for _, text in recipe.source.documents():
        if text.strip():
            found = True
            yield text.encode(errors="replace").decode()
    if not found:
        raise InputError(f"data.source {type(recipe.source).__name__} has no text in it: point it at other files")


def _publish(temporary: Path, folder: Path) -> None:
    """Put the new cache into its place; who has an older one mapped keeps it."""
    older = folder.with_name(folder.name + ".old")
    shutil.rmtree(older, ignore_errors=True)
    if folder.exists():
        folder.rename(older)
    temporary.rename(folder)
    handle = os.open(folder.parent, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
    shutil.rmtree(older, ignore_errors=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Hold the cache's lock; the system frees it when this process ends, however it ends."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(folder.name + ".lock").open("w")
    except OSError as error:
        raise InputError(f"data.cache_dir {str(folder.parent)!r} cannot be written: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another `prepare` is filling {folder} right now: wait until it is done") from None
        yield
