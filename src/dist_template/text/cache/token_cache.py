"""The token cache: a folder that one process writes once and every rank maps into memory.

    <cache_dir>/<source>-<hash of the recipe>/
        train.bin validation.bin test.bin   token ids (uint16 where they fit); a document starts
                                            as tokenizer(text) does (BOS), and EOS ends it
        train.starts …                      of whole documents: int64 starts, and the end
        train.counted …                     of whole documents: uint8, 1 is a label that counts
        tokenizer/                          in transformers' layout
        manifest.json                       recipe, fingerprints of files read, counts, checksums

A hash of its text assigns a document to a split: the splits do not depend on the order of files,
and exact duplicates are in one split. `tokenizers` encodes on all cores by its own threads, in
bounded memory. A cache is written into a temporary folder, which is renamed when it is complete; an
older cache stays until then."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np

from ...errors import InputError, is_disk_full
from ...records import sha256
from ..sources.documents import Encoded, Source, batches_of, texts_of
from ..sources.notes import describe
from ..tokenizers import TokenizerSpec, added_tokens
from .baselines import Baselines, compressed, unigram, weighted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer

SPLITS = ("train", "validation", "test")
# Kind of a split's file: its checksum's key in the manifest. Plain text has only the first.
CHECKSUMS = {"bin": "sha256", "starts": "starts_sha256", "counted": "counted_sha256"}
COUNTS = ("documents", "bytes", "tokens")  # of a split in the manifest; bytes of UTF-8 text
FORMAT = 1  # part of the folder's name: raise it when the layout changes
FULL_CHECK_BYTES = 2**28  # of larger files the sizes are compared, and not the checksums
REPORT_S = 10  # between two lines of progress
Added = tuple[str, Encoded]  # a document's text and tokens


class CacheError(InputError):
    """The cache cannot be used; running `prepare` again replaces it."""


@dataclass(frozen=True)
class Recipe:
    """The configuration that determines a cache; its hash names the folder."""

    source: Source
    tokenizer: TokenizerSpec
    validation_share: float
    test_share: float

    def spec(self) -> dict[str, object]:
        return {
            "format": FORMAT,
            "source": self.source.spec(),
            "tokenizer": self.tokenizer.spec(),
            "validation_share": self.validation_share,
            "test_share": self.test_share,
        }

    def folder(self, cache_dir: str) -> Path:
        spec = json.dumps(self.spec(), sort_keys=True, default=str).encode()
        digest = hashlib.sha256(spec).hexdigest()[:12]
        return Path(cache_dir, f"{type(self.source).__name__}-{digest}")

    def files(self) -> list[Path]:
        return self.source.files() + self.tokenizer.files()

    def split_of(self, text: str) -> str:
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        bucket = int.from_bytes(digest) / 2**64  # in [0, 1)
        if bucket < self.test_share:
            return "test"
        if bucket < self.test_share + self.validation_share:
            return "validation"
        return "train"


@dataclass(frozen=True)
class Corpus:
    """A complete cache."""

    folder: Path
    manifest: dict[str, Any]
    # by packing_of's arguments
    packings: dict[tuple[str, int, bool], Any] = field(default_factory=dict)

    def num_tokens(self, split: str) -> int:
        return self.manifest["splits"][split]["tokens"]

    def parts(self, split: str) -> dict[str, dict[str, int]]:
        """Returns documents, bytes and tokens of each source, in order; of all, if it is one."""
        parts = self.manifest.get("parts", {"": self.manifest["splits"]})
        return {name: counts[split] for name, counts in parts.items()}

    def num_bytes(self, split: str) -> int:
        return self.manifest["splits"][split]["bytes"]

    def baselines(self, weights: dict[str, float] | None = None) -> Baselines:
        """Returns what predictors without a model reach on the train split, of a mixture by its
        weights of samples; {} for pairs, and for caches of earlier versions."""
        known: dict[str, Baselines] = self.manifest.get("baselines") or {}
        if weights is None:
            weights = {}
        sources = []
        for name, counts in self.parts("train").items():
            if name in known:
                share = weights.get(name, counts["tokens"])
                sources.append((known[name], share, counts["tokens"]))
        return weighted(sources)

    def tokens(self, split: str) -> np.ndarray:
        return self._map(split, "bin", self.manifest["dtype"])

    def is_whole(self, split: str) -> bool:
        """Whether documents are stored unsplit, with start offsets and loss masks."""
        return CHECKSUMS["starts"] in self.manifest["splits"][split]

    @property
    def is_pairs(self) -> bool:
        """Whether each document is a pair of sequences."""
        return self.manifest.get("pairs", False)  # older caches have none

    @property
    def start_ids(self) -> list[int]:
        """The tokens that each plain text starts with, such as BOS; older caches have none."""
        return self.manifest.get("start_ids") or []

    def starts(self, split: str) -> np.ndarray:
        """Returns (documents + 1,): the documents' starts among the tokens, and the end."""
        return np.fromfile(self.folder / f"{split}.starts", dtype=np.int64)

    def counted(self, split: str) -> np.ndarray:
        """Returns (tokens,): whether each token is a label that counts."""
        return self._map(split, "counted", "bool")

    def _map(self, split: str, kind: str, dtype: str) -> np.ndarray:
        if not self.num_tokens(split):
            return np.zeros(0, dtype=dtype)  # an empty file cannot be mapped
        return np.memmap(self.folder / f"{split}.{kind}", dtype=dtype, mode="r")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from transformers import AutoTokenizer

        # ty does not see that a folder with tokenizer.json gives the fast kind
        return AutoTokenizer.from_pretrained(self.folder / "tokenizer", trust_remote_code=False)  # ty: ignore

    def content(self) -> str:
        """Returns a description of the tokens, by which a resumed run recognises them."""
        content = [self.manifest["splits"], self.manifest.get("parts")]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
        line = f"{self.num_tokens('train'):,} tokens with SHA-256 {digest}"
        if self.start_ids:
            line += ", BOS first (add_bos_token)"
        return line  # of at most 80 characters

    def describe(self) -> str:
        line = "  {:<10} {documents:>9,} documents {bytes:>15,} bytes {tokens:>15,} tokens"
        lines = []
        for split, counts in self.manifest["splits"].items():
            lines.append(line.format(split, **counts))
        for source, counts in self.parts("train").items():
            if source:  # one of a mixture
                lines.append(line.format(f"  {source}", **counts))
        for source, notes in self.manifest.get("notes", {}).items():  # older caches have none
            if source:
                lines.append(f"  {source}:")
            lines += describe(notes)
        lines += self._notes()
        return "\n".join(lines)

    def _ends(self) -> str:
        """Returns what a plain text starts and ends with. Only the tokenizer knows it of a cache of
        an earlier version, and takes a second to load."""
        if "start_ids" in self.manifest:
            start = " ".join(self.manifest["start_tokens"]) or "no BOS"
            return f"each text starts with {start} and ends with {self.manifest['eos_token']}"
        end = self.tokenizer.eos_token
        added, _ = added_tokens(self.tokenizer)
        if not added:
            return f"each text starts with no BOS and ends with {end}"
        names = " ".join(self.tokenizer.convert_ids_to_tokens(added))
        return (
            f"each text starts without {names}, which prompts have, and ends with {end}: the cache"
            " is of an earlier version; to add it, remove the cache and prepare again"
        )

    def _notes(self) -> Iterator[str]:
        """Yields what a plain text starts and ends with, and what was done to texts."""
        if not self.is_whole("train"):
            yield f"  {self._ends()}"
        texts = self.manifest.get("texts", {})  # older caches have none
        if texts.get("empty"):
            yield f"  empty texts, skipped: {texts['empty']:,}"
        if texts.get("halves"):
            yield f"  texts with half of a surrogate pair, written as ?: {texts['halves']:,}"


def open_cache(recipe: Recipe, cache_dir: str, check_source: bool = True) -> Corpus:
    """Returns the prepared cache. Raises CacheError if it is missing or damaged, or the files that
    it was made from have changed, and InputError if the source's files are missing."""
    files = recipe.files() if check_source else []
    folder = recipe.folder(cache_dir)
    if not folder.is_dir():
        raise CacheError(
            f"there is no token cache {folder} for this configuration: run `prepare` first"
        )
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        damage = _first_damage(folder, manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        damage = f"{type(error).__name__}: {error}"
    if damage:
        raise CacheError(f"the token cache {folder} is damaged ({damage}): run `prepare` again")
    if check_source:
        change = _first_change(manifest["files"], files)
        if change:
            raise CacheError(f"the token cache {folder} is stale ({change}): run `prepare` again")
    return Corpus(folder, manifest)


def _first_damage(folder: Path, manifest: dict[str, Any]) -> str | None:
    """Returns what is wrong with the files that the manifest lists."""
    expected = {}
    for name, digest in manifest["tokenizer"].items():
        expected[folder / "tokenizer" / name] = digest
    item_bytes = np.dtype(manifest["dtype"]).itemsize
    for split in SPLITS:
        entry = manifest["splits"][split]
        path, size = folder / f"{split}.bin", entry["tokens"] * item_bytes
        if path.stat().st_size != size:
            return f"{path.name} has {path.stat().st_size} bytes, not {size}"
        for kind, key in CHECKSUMS.items():
            if key in entry:  # plain text has only the first
                expected[folder / f"{split}.{kind}"] = entry[key]
    for path, digest in expected.items():
        if path.stat().st_size <= FULL_CHECK_BYTES and sha256(path) != digest:
            return f"{path.name} has another checksum"
    return None


def _first_change(recorded: list[dict[str, Any]], files: list[Path]) -> str | None:
    """Returns the first difference; a file with another time and the same content is unchanged."""
    differing = {record["path"] for record in recorded} ^ set(map(str, files))
    if differing:
        return f"{min(differing)} came or went"
    for record, path in zip(recorded, files, strict=True):
        status = path.stat()
        if status.st_size != record["size"]:
            return f"{path} has changed"
        # reading it takes longer than looking at its time
        if status.st_mtime_ns != record["mtime_ns"] and sha256(path) != record["sha256"]:
            return f"{path} has changed"
    return None


class Documents(NamedTuple):
    """The documents of a split: names, sources ("" if there is one), texts, ends in its tokens."""

    names: list[str]
    sources: list[str]
    texts: list[str]
    ends: np.ndarray


def read_documents(recipe: Recipe, corpus: Corpus, split: str) -> Documents:
    """Reads the texts of a split from the source: the cache holds tokens alone."""
    if corpus.is_whole(split):
        ends = corpus.starts(split)[1:]
    else:  # no text has the token that ends a document (tokenizers.py)
        end = corpus.manifest["eos_token_id"]
        more = corpus.start_ids.count(end)  # it may be BOS too (OPT)
        ends = np.flatnonzero(corpus.tokens(split) == end)[more :: more + 1] + 1
    documents = Documents([], [], [], ends)
    for part, source in recipe.source.parts().items():
        for name, text in texts_of(source):
            if recipe.split_of(text) == split:
                documents.names.append(name)
                documents.sources.append(part)
                documents.texts.append(text)
    if len(documents.texts) != len(ends):
        raise InputError(f"data.source has changed since {corpus.folder}: run `prepare` again")
    return documents


def build_cache(recipe: Recipe, cache_dir: str, report: Callable[[str], None]) -> Corpus:
    """Tokenizes into a new cache, which replaces an older one of the same recipe. Raises InputError
    if another process is building it, the disk is full, or the source is unreadable or empty."""
    folder = recipe.folder(cache_dir)
    temporary = folder.with_name(folder.name + ".tmp")
    with _lock(folder):
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        try:
            temporary.mkdir()
            manifest = _write(recipe, temporary, report)
            shutil.rmtree(folder, ignore_errors=True)  # processes that mapped it keep reading it
            temporary.rename(folder)
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


def _lock(folder: Path) -> TextIO:
    """Returns the cache's lock; the system releases it when this process exits for any reason."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(folder.name + ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"another `prepare` is filling {folder} right now: wait until it is done"
        ) from None
    except OSError as error:
        raise InputError(
            f"data.cache_dir {str(folder.parent)!r} cannot be written: {error.strerror}"
        ) from error
    return lock


def _write(recipe: Recipe, folder: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """Writes the files of a cache; returns its manifest."""
    # fingerprints before they are read: a later change makes the cache stale
    files = [_fingerprint(path) for path in recipe.files()]
    tokenizer = recipe.source.prepare_tokenizer(recipe.tokenizer.fit(_training_texts(recipe)))
    tokenizer.save_pretrained(folder / "tokenizer")
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    sources, whole = recipe.source.parts(), recipe.source.whole
    writers: dict[str, _SplitWriter] = {}
    for split in SPLITS:
        writers[split] = _SplitWriter(folder / split, len(tokenizer), dtype, sources, whole)

    done = Counter[str]()  # to texts, which prepare reports
    started = reported = time.monotonic()
    for part, source in sources.items():
        for documents in batches_of(source, done):
            added: dict[str, list[Added]] = {split: [] for split in SPLITS}
            encoded = source.encode(recipe.tokenizer, tokenizer, documents)
            for (_, text), document in zip(documents, encoded, strict=True):
                added[recipe.split_of(text)].append((text, document))
            for split, writer in writers.items():
                writer.write(part, added[split])
            now = time.monotonic()
            if now - reported > REPORT_S:
                reported = now
                tokens = sum(writer.num_tokens for writer in writers.values())
                report(f"  {tokens:,} tokens, {tokens / (now - started):,.0f} per second")
    splits = {split: writer.finish() for split, writer in writers.items()}

    start_ids: list[int] = []
    if not whole:
        start_ids, _ = added_tokens(tokenizer)
    manifest = {
        "spec": recipe.spec(),
        "dtype": dtype.name,
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "eos_token": tokenizer.eos_token,
        "start_ids": start_ids,
        "start_tokens": tokenizer.convert_ids_to_tokens(start_ids),
        "texts": done,
        "splits": splits,
        "pairs": recipe.source.pairs,
        "unigram_bits_per_byte": None,
        "baselines": None,
        "tokenizer": {path.name: sha256(path) for path in sorted((folder / "tokenizer").iterdir())},
        "files": files,
        "notes": {part: source.notes() for part, source in sources.items() if source.notes()},
    }
    if "" not in sources:  # a mixture: one source after another
        manifest["parts"] = {
            part: {split: writers[split].parts[part] for split in SPLITS} for part in sources
        }
    if not recipe.source.pairs:  # whose loss is of no single token
        manifest["baselines"] = _baselines(Corpus(folder, manifest), writers["train"].labels)
    num_bytes = splits["validation"]["bytes"]
    if num_bytes and not whole:  # where only some labels count, a loss per byte has no meaning
        bits = _unigram_bits(writers["train"].label_counts, writers["validation"].label_counts)
        manifest["unigram_bits_per_byte"] = float(bits / num_bytes)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, default=str), "utf-8")
    return manifest


def _fingerprint(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {
        "path": str(path),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "sha256": sha256(path),
    }


def _training_texts(recipe: Recipe) -> Iterator[str]:
    for _, text in texts_of(recipe.source):
        if recipe.split_of(text) == "train":
            yield text


def _unigram_bits(trained: np.ndarray, held_out: np.ndarray) -> float:
    """Returns the bits of labels by a model that knows how often each token is one in training.

    Args:
        trained: (V,) How often each token is a label there. Each is counted once more, so that
            none has the probability 0 (Laplace).
        held_out: (V,) The same of the labels."""
    probabilities = (trained + 1) / (trained + 1).sum()
    return -(held_out * np.log2(probabilities)).sum()


def _baselines(corpus: Corpus, labels: dict[str, np.ndarray]) -> dict[str, Baselines]:
    """Returns the figures of each source, with its numbers of each token as a label."""
    tokens, counted = corpus.tokens("train"), None
    if corpus.is_whole("train"):
        counted = corpus.counted("train")
    baselines: dict[str, Baselines] = {}
    end = 0
    for part, counts in corpus.parts("train").items():
        start, end = end, end + counts["tokens"]
        baselines[part] = unigram(labels[part])
        if baselines[part]["labels"]:
            mask = None if counted is None else counted[start:end]
            baselines[part]["compressed_loss"] = compressed(tokens[start:end], mask)
    return baselines


class _SplitWriter:
    """Writes one split's files, `path` with a suffix for each kind, and counts what is in them."""

    def __init__(
        self, path: Path, vocab_size: int, dtype: np.dtype, parts: Iterable[str], whole: bool
    ) -> None:
        self.parts = {part: dict.fromkeys(COUNTS, 0) for part in parts}
        # of each token as a label that counts
        self.labels = {part: np.zeros(vocab_size, dtype=np.int64) for part in self.parts}
        self._path, self._dtype, self._whole = path, dtype, whole
        self._lengths = [0]  # of whole documents
        kinds = tuple(CHECKSUMS) if whole else ("bin",)
        self._sha256 = {kind: hashlib.sha256() for kind in kinds}
        for kind in kinds:
            path.with_suffix(f".{kind}").touch()  # a split may have no document

    def write(self, part: str, added: list[Added]) -> None:
        if not added:
            return
        counts, masks, labels = self.parts[part], [], []
        for text, (ids, counted) in added:
            counts["documents"] += 1
            counts["bytes"] += len(text.encode())
            counts["tokens"] += len(ids)
            if counted is None:
                counted = np.ones(len(ids), dtype=bool)
            masks.append(counted)
            if self._whole:  # its first token is no label
                labels.append(ids[1:][counted[1:]])
            else:  # one stream
                labels.append(ids)
        label_counts = self.labels[part]
        label_counts += np.bincount(np.concatenate(labels), minlength=len(label_counts))
        ids = np.concatenate([document.ids for _, document in added])
        self._append("bin", ids.astype(self._dtype))
        if self._whole:
            self._lengths += map(len, masks)
            self._append("counted", np.concatenate(masks))

    @property
    def num_tokens(self) -> int:
        return sum(counts["tokens"] for counts in self.parts.values())

    @property
    def label_counts(self) -> np.ndarray:
        """How often each token is a label, of all sources."""
        return np.sum(list(self.labels.values()), axis=0)

    def finish(self) -> dict[str, Any]:
        """Returns the split's entry in the manifest, when its files are on the disk."""
        if self._whole:
            self._append("starts", np.cumsum(self._lengths, dtype=np.int64))
        entry: dict[str, Any] = {}
        for key in COUNTS:
            entry[key] = sum(counts[key] for counts in self.parts.values())
        for kind, hashed in self._sha256.items():
            with self._path.with_suffix(f".{kind}").open("rb") as file:
                os.fsync(file.fileno())
            entry[CHECKSUMS[kind]] = hashed.hexdigest()
        return entry

    def _append(self, kind: str, values: np.ndarray) -> None:
        data = values.tobytes()
        self._sha256[kind].update(data)
        with self._path.with_suffix(f".{kind}").open("ab") as file:
            file.write(data)
