"""What the model is trained on. Edit this file, or only its keys in YAML.

    source -> documents -> train, validation and test split -> token ids -> rows of T + 1 tokens -> batches

The base class does everything after `documents`: it splits by a hash of the text, tokenizes once into a memory-mapped
cache, packs, orders by (seed, samples consumed) and resumes. A new source is one class with one method.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dist_template.text import ByteBPE, PackedText, Source, StandardLibrary, TokenizerSpec


class Paragraphs(Source):
    """A source of your own: each paragraph of the .txt files in a folder is a document.

    Select it with --data.source Paragraphs --data.source.folder FOLDER.

    Args:
        folder: Where the .txt files are.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def documents(self) -> Iterator[tuple[str, str]]:
        """Pairs (name, text), in the same order each time."""
        for path in self.files():
            for number, text in enumerate(path.read_text(encoding="utf-8").split("\n\n")):
                yield f"{path.name}:{number}", text

    def files(self) -> list[Path]:
        """The token cache is rebuilt when one of these changes."""
        return sorted(Path(self.folder).glob("*.txt"))


class DataModule(PackedText):
    """Text as packed rows of tokens, resumable to the sample.

    Args:
        source: Where documents come from: StandardLibrary, TextFiles, Jsonl, Parquet, HubDataset, or yours.
        tokenizer: How text becomes tokens: Bytes, ByteBPE (learned from the train split), Pretrained, yours.
        seq_len: Tokens per sequence.
        global_batch_size: Sequences per optimizer step, over all ranks.
        micro_batch_size: Sequences per rank per forward; gradients accumulate up to the global batch.
        options: validation_share, test_share, cache_dir, num_workers, seed, prompts …: see PackedText.
    """

    def __init__(
        self,
        source: Source = StandardLibrary(),  # noqa: B008  (nothing changes it)
        tokenizer: TokenizerSpec = ByteBPE(vocab_size=2048),  # noqa: B008
        seq_len: int = 256,
        global_batch_size: int = 16,
        micro_batch_size: int = 8,
        **options: Any,
    ) -> None:
        super().__init__(source, tokenizer, seq_len, global_batch_size, micro_batch_size, **options)

    def transform(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Change a batch on the host: mask labels with -100, add tensors for `forward`."""
        return batch
