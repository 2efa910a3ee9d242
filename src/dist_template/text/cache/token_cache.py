"""The token cache: a folder that one process writes once (`build.py`) and every rank maps into
memory.

    <cache_dir>/<source>-<hash of the recipe>/
        train.bin validation.bin test.bin   token ids (uint16 where they fit), EOS ends a document
        train.starts …                      of whole documents: int64 starts, and the end
        train.counted …                     of whole documents: uint8, 1 is a label that counts
        tokenizer/                          in transformers' layout
        manifest.json                       recipe, fingerprints of files read, counts, checksums

A hash of its text assigns a document to a split: the splits do not depend on the order of files,
and exact duplicates are in one split.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import InputError
from ...records import sha256
from ..sources.documents import Source
from ..tokenizers import TokenizerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPLITS = ("train", "validation", "test")
# Kind of a split's file: its checksum's key in the manifest. Plain text has only the first.
CHECKSUMS = {"bin": "sha256", "starts": "starts_sha256", "counted": "counted_sha256"}
FORMAT = 1  # part of the folder's name: raise it when the layout changes
# Larger files are checksummed by `prepare` alone, not at each start of each rank.
FULL_CHECK_BYTES = 2**28


class CacheError(InputError):
    """The cache cannot be used; running `prepare` again replaces it."""


@dataclass(frozen=True)
class Recipe:
    """The configuration that determines a cache; its hash names the folder."""

    source: Source
    tokenizer: TokenizerSpec
    validation_share: float
    test_share: float

    def spec(self) -> dict[str, Any]:
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
        template = self.tokenizer.template_files() if self.source.whole else []
        return [*self.source.files(), *self.tokenizer.files(), *template]

    def split_of(self, text: str) -> str:
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        bucket = int.from_bytes(digest) / 2**64  # in [0, 1)
        if bucket < self.test_share:
            return "test"
        return "validation" if bucket < self.test_share + self.validation_share else "train"


@dataclass(frozen=True)
class Corpus:
    """A complete cache."""

    folder: Path
    manifest: dict[str, Any]
    packings: dict[tuple[str, int], Any] = field(default_factory=dict)  # by split and seq_len

    def num_tokens(self, split: str) -> int:
        return self.manifest["splits"][split]["tokens"]

    def parts(self, split: str) -> dict[str, dict[str, int]]:
        """Returns documents, bytes and tokens of each source, in order; of all, if it is one."""
        parts = self.manifest.get("parts", {"": self.manifest["splits"]})
        return {name: counts[split] for name, counts in parts.items()}

    def num_bytes(self, split: str) -> int:
        """Bytes of UTF-8 text."""
        return self.manifest["splits"][split]["bytes"]

    def tokens(self, split: str) -> np.ndarray:
        return self._map(split, "bin", self.manifest["dtype"])

    def is_whole(self, split: str) -> bool:
        """Whether its documents are not cut: it has `starts` and `counted`."""
        return CHECKSUMS["starts"] in self.manifest["splits"][split]

    @property
    def is_pairs(self) -> bool:
        """Whether each document is a pair of sequences."""
        return self.manifest.get("pairs", False)  # older caches have none

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
    def tokenizer(self) -> PreTrainedTokenizerFast:
        from transformers import AutoTokenizer

        # ty does not see that a folder with tokenizer.json gives the fast kind
        return AutoTokenizer.from_pretrained(self.folder / "tokenizer", trust_remote_code=False)  # ty: ignore

    def content(self) -> str:
        """Returns a description of the tokens, by which a resumed run recognises them."""
        content = [self.manifest["splits"], self.manifest.get("parts")]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.num_tokens('train'):,} tokens with SHA-256 {digest}"

    def describe(self) -> str:
        line = "  {:<10} {documents:>9,} documents {bytes:>15,} bytes {tokens:>15,} tokens"
        parts = [(f"  {name}", held) for name, held in self.parts("train").items() if name]
        known = [*self.manifest["splits"].items(), *parts]
        return "\n".join(line.format(name, **held) for name, held in known)


def open_cache(
    recipe: Recipe, cache_dir: str, check_source: bool = True, every_byte: bool = False
) -> Corpus:
    """Returns the prepared cache.

    Args:
        recipe: The configuration that determines it.
        cache_dir: The folder of the caches.
        check_source: Refuse it when the files that it was made from have changed.
        every_byte: Verify the checksums of large files too.

    Raises:
        CacheError: it is missing, stale or damaged.
        InputError: the source's files are missing.
    """
    files = recipe.files() if check_source else []
    folder = recipe.folder(cache_dir)
    if not folder.is_dir():
        raise CacheError(
            f"there is no token cache {folder} for this configuration: run `prepare` first"
        )
    manifest, damage = _read_manifest(folder, every_byte)
    if damage:
        raise CacheError(f"the token cache {folder} is damaged ({damage}): run `prepare` again")
    change = _first_change(manifest["files"], files) if check_source else None
    if change:
        raise CacheError(f"the token cache {folder} is stale ({change}): run `prepare` again")
    return Corpus(folder, manifest)


def fingerprint(path: Path) -> dict[str, Any]:
    held = path.stat()
    known = {"path": str(path), "size": held.st_size, "mtime_ns": held.st_mtime_ns}
    return known | {"sha256": sha256(path)}


def _read_manifest(folder: Path, every_byte: bool) -> tuple[dict[str, Any], str | None]:
    """Returns the manifest, and what is wrong with the files that it lists."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        width = np.dtype(manifest["dtype"]).itemsize
        expected = {
            folder / "tokenizer" / name: digest for name, digest in manifest["tokenizer"].items()
        }
        for split, (kind, key) in product(SPLITS, CHECKSUMS.items()):
            held, path = manifest["splits"][split], folder / f"{split}.{kind}"
            if kind != "bin" and key not in held:
                continue  # plain text
            sizes = {"bin": held["tokens"] * width, "counted": held["tokens"]}
            size = sizes.get(kind, (held["documents"] + 1) * 8)
            if path.stat().st_size != size:
                return {}, f"{path.name} has {path.stat().st_size} bytes, not {size}"
            expected[path] = held[key]
        for path, digest in expected.items():
            if (every_byte or path.stat().st_size <= FULL_CHECK_BYTES) and sha256(path) != digest:
                return {}, f"{path.name} has another checksum"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, f"{type(error).__name__}: {error}"
    return manifest, None


def _first_change(recorded: list[dict[str, Any]], files: list[Path]) -> str | None:
    """Returns the first difference; a file with another time and the same content is unchanged."""
    if [r["path"] for r in recorded] != [str(p) for p in files]:
        differing = {r["path"] for r in recorded} ^ {str(p) for p in files}
        return f"{min(differing)} came or went" if differing else "its files are in another order"
    for record, path in zip(recorded, files, strict=True):
        held = path.stat()
        touched = held.st_mtime_ns != record["mtime_ns"]
        if held.st_size != record["size"] or (touched and sha256(path) != record["sha256"]):
            return f"{path} has changed"
    return None
