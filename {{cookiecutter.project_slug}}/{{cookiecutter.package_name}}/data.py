"""The training data. Edit this file, or only its keys in YAML.

    source -> documents -> train, validation, test -> token ids -> rows of T + 1 tokens -> batches

A new source is one class with the method `documents`. The base class splits by a hash
of the text, tokenizes once into a memory-mapped cache, packs the tokens into rows, and orders the
rows by seed and consumed samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dist_template.by_tokens import Auto, Phase
from dist_template.text import ByteBPE, PackedText, Source, StandardLibrary, TokenizerSpec


class Paragraphs(Source):
    """An example of your own source: each paragraph of the .txt files in a folder is a document.

    Select it with --data.source Paragraphs --data.source.folder FOLDER.

    Args:
        folder: The folder of the .txt files.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yields pairs (name, text), in the same order each time."""
        for path in self.files():
            for number, text in enumerate(path.read_text(encoding="utf-8").split("\n\n")):
                yield f"{path.name}:{number}", text

    def files(self) -> list[Path]:
        """Returns the files that are read: the token cache is rebuilt when one of them changes."""
        return sorted(Path(self.folder).glob("*.txt"))


class DataModule(PackedText):
    """Packs text into rows of tokens; a run resumes at the next sample.

    Args:
        source: Document source: StandardLibrary, TextFiles, Jsonl, Parquet, HubDataset, or yours.
        tokenizer: Text to tokens: Bytes, ByteBPE (learned from the train split), Pretrained, yours.
        seq_len: Tokens per sequence.
        global_batch_size: Sequences per optimizer step, over all ranks; or phases by consumed
            tokens; or auto: as many as leave a fine-tuning enough steps.
        micro_batch_size: Sequences per rank per forward; gradients accumulate to the global batch.
        options: PackedText's: validation_share, test_share, cache_dir, num_workers, seed, prompts …
    """

    def __init__(
        self,
        source: Source = StandardLibrary(),  # noqa: B008  (nothing changes it)
        tokenizer: TokenizerSpec = ByteBPE(vocab_size=2048),  # noqa: B008
        seq_len: int = 256,
        global_batch_size: int | list[Phase] | Auto = 16,
        micro_batch_size: int = 8,
        **options: Any,
    ) -> None:
        super().__init__(source, tokenizer, seq_len, global_batch_size, micro_batch_size, **options)

    def transform(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns a changed batch on the host: mask labels with -100, add tensors for `forward`."""
        return batch
