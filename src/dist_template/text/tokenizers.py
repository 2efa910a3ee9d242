"""Tokenizers: a class describes one; its `fit` makes the one that is saved with the tokens.

fit       once, in `prepare`: makes, learns or loads a tokenizer of transformers
encode    of each batch of texts, without special tokens; a source adds BOS and EOS"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError, require
from ..hub import check_reachable, why_not_loaded
from ..project import Choice
from ..ranges import PositiveInt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Fast

EOS = "<|endoftext|>"
MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")  # base64 of a token's bytes, and its rank
SENTENCES = ("The quick brown fox", "the 12 foxes, Grüße and 世界", "def f(x): return x")
PROBES = ("a", "0", " ", "的")  # a vocabulary may lack some


class TokenizerSpec(Choice, ABC):
    """Base class of a tokenizer's description."""

    @abstractmethod
    def fit(self, texts: Iterator[str]) -> Fast:
        """Returns the tokenizer, trained on the train split's `texts` if it is trainable."""

    def encode(self, tokenizer: Fast, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns each text's token ids, no special tokens: an EOS in a text is encoded as text."""
        backend = tokenizer.backend_tokenizer
        backend.encode_special_tokens = True
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(e.ids, dtype=np.int64) for e in encodings]

    def files(self) -> list[Path]:
        """Returns the local files that it reads: a change in one makes the cache stale."""
        return []

    def spec(self) -> dict[str, object]:
        """Returns what identifies the tokenizer, in plain types."""
        return {"class": type(self).__name__} | vars(self)


class Bytes(TokenizerSpec):
    """UTF-8 bytes: id = byte, and 256 is EOS. It needs no training; sequences are long."""

    vocab_size = 257  # before `prepare`, for `plan`; ByteBPE has it too

    def fit(self, texts: Iterator[str]) -> Fast:
        from tokenizers import Tokenizer, models
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        characters = bytes_to_unicode()  # the printable character of each byte, as of GPT-2
        vocabulary = {characters[byte]: byte for byte in range(256)}
        vocabulary[EOS] = 256
        return _wrap(Tokenizer(models.BPE(vocab=vocabulary, merges=[])), use_regex=False)

    def encode(self, tokenizer: Fast, texts: Sequence[str]) -> list[np.ndarray]:
        # The same ids as the tokenizer's, about 50 times faster.
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


class ByteBPE(TokenizerSpec):
    """Byte-pair encoding over bytes, as GPT-2's, learned from the train split: same data, same
    merges.

    Args:
        vocab_size: Number of tokens, with the 256 bytes and the end of a document among them; at
            least 257.
        train_mib: MiB of text to learn from, taken from the beginning of the train split."""

    def __init__(self, vocab_size: int = 2048, train_mib: PositiveInt = 256) -> None:
        if vocab_size < 257:
            raise InputError(
                f"data.tokenizer.vocab_size {vocab_size} is below 257: 256 bytes and the EOS token"
            )
        self.vocab_size = vocab_size
        self.train_mib = train_mib

    def fit(self, texts: Iterator[str]) -> Fast:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        tokenizer = _wrap(Tokenizer(models.BPE()), use_regex=True)
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=[EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend = tokenizer.backend_tokenizer
        backend.train_from_iterator(_first(texts, self.train_mib * 2**20), trainer)
        return _wrap(backend, use_regex=True)


@dataclass
class Pretrained(TokenizerSpec):
    """The tokenizer of published or own weights; it must have an EOS token.

    Args:
        path: A local folder, or a name on the Hugging Face hub.
        special_tokens: Further special tokens, such as a chat template's, which a base model
            does not have. The model's embeddings get rows for them.
        eos_token: The token that ends a document or an answer. null: the tokenizer's.
        add_bos_token: Whether plain texts and prompts start with the tokenizer's BOS token, in
            training, evaluation, `export` and `serve`. null: as the tokenizer has it. false: as in
            documents of earlier versions, for their runs."""

    path: str
    special_tokens: list[str] = field(default_factory=list)
    eos_token: str | None = None
    add_bos_token: bool | None = None

    def fit(self, texts: Iterator[str]) -> Fast:
        check_reachable(self.path)
        model = _model_file(Path(self.path))
        try:
            tokenizer = read_tokenizer(self.path)
        except Exception as error:  # OSError, ValueError, KeyError and others
            raise InputError(
                f"data.tokenizer.path {self.path!r} cannot be loaded:"
                f" {why_not_loaded(self.path, error)}"
            ) from error
        if tokenizer is None:
            raise InputError(
                f"data.tokenizer.path {self.path!r} has no files of a tokenizer: give a folder with"
                " a tokenizer.json"
            )
        if not tokenizer.is_fast:
            raise InputError(
                f"data.tokenizer.path {self.path!r} is a slow tokenizer"
                f" ({type(tokenizer).__name__}, in Python): it needs a tokenizer.json, which"
                " save_pretrained of a fast tokenizer writes"
            )
        if model:
            _check_pieces(tokenizer, model)
        extra = {"extra_special_tokens": self.special_tokens}
        tokenizer.add_special_tokens(extra, replace_extra_special_tokens=False)
        if self.eos_token:
            if self.eos_token not in tokenizer.get_vocab():
                raise InputError(
                    f"data.tokenizer.eos_token {self.eos_token!r} is no token of {self.path!r}:"
                    " give one of its vocabulary, or add it to data.tokenizer.special_tokens"
                )
            tokenizer.eos_token = self.eos_token
        if tokenizer.eos_token_id is None:
            raise InputError(
                f"data.tokenizer.path {self.path!r} has no EOS token, which must end each document"
            )
        if self.add_bos_token is not None:
            self._set_bos(tokenizer, self.add_bos_token)
        return tokenizer

    def _set_bos(self, tokenizer: Fast, adds: bool) -> None:
        """Makes the tokenizer put BOS before a text, or nothing; that is saved with it."""
        if adds and tokenizer.bos_token_id is None:
            raise InputError(
                f"data.tokenizer.add_bos_token is true, and {self.path!r} has no BOS token: remove"
                " it"
            )
        before, _ = added_tokens(tokenizer)
        if adds != bool(before):
            tokenizer.add_bos_token = adds

    def spec(self) -> dict[str, object]:
        spec = super().spec()
        if self.add_bos_token is None:  # caches from before there was the key have none
            del spec["add_bos_token"]
        return spec

    def files(self) -> list[Path]:
        found: set[Path] = set()
        for pattern in ("*token*", "vocab*", "merges*", "*.model", "chat_template*"):
            found.update(Path(self.path).glob(pattern))
        return sorted(filter(Path.is_file, found))


def added_tokens(tokenizer: Fast) -> tuple[list[int], list[int]]:
    """Returns the special tokens that `tokenizer(text)` puts before a text, mostly BOS, and those
    that it appends. Its post-processor decides it, which `add_bos_token` sets."""
    for text in PROBES:
        encoded = tokenizer.backend_tokenizer.encode(text)
        of_text = [n for n, special in enumerate(encoded.special_tokens_mask) if not special]
        if of_text:
            return encoded.ids[: of_text[0]], encoded.ids[of_text[-1] + 1 :]
    return [], []


def encode_prompt(tokenizer: Fast, prompt: str) -> list[int]:
    """Returns the tokens of a text that the model continues: they start as a document does, and
    nothing follows them, such as the EOS that some tokenizers append."""
    start, _ = added_tokens(tokenizer)
    return start + tokenizer.encode(prompt, add_special_tokens=False)


def read_tokenizer(name: str) -> Any:
    """Returns the tokenizer of a folder or hub name; None if it has no files of one. Raises what
    transformers raises if it cannot be loaded.

    Where these files are missing, transformers (5.23) makes an empty tokenizer up for many types of
    models, such as Qwen3: it has special tokens only."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    special.update(tokenizer.all_special_tokens)
    others = tokenizer.get_vocab().keys() - special
    if len(others) <= 1:  # an empty one of T5's type has the mark of a space
        return None
    return tokenizer


def _model_file(folder: Path) -> Path | None:
    """Returns the sentencepiece model of a folder without tokenizer.json, from which transformers
    makes a tokenizer. Raises InputError if the package that reads it, or tiktoken's form, is
    missing: transformers (5.23) would report another one, or an error in a line."""
    models = [folder / name for name in MODELS if (folder / name).is_file()]
    if (folder / "tokenizer.json").exists() or not models:
        return None
    model = models[0]
    with model.open("rb") as file:
        is_tiktoken = TIKTOKEN.match(file.read(400)) is not None
    package = "tiktoken" if is_tiktoken else "sentencepiece"
    require(package, f"data.tokenizer.path {str(folder)!r}, whose {model.name} is its form,")
    return None if is_tiktoken else model


def _check_pieces(tokenizer: Fast, model: Path) -> None:
    """Raises InputError if the tokenizer that transformers made of a sentencepiece model divides
    texts otherwise. Without the model's own class in tokenizer_config.json, for one, it does not
    begin a text with a space."""
    from sentencepiece import SentencePieceProcessor

    pieces: Any = SentencePieceProcessor(model_file=str(model))
    for text in SENTENCES:
        if pieces.unk_id() in pieces.encode(text):
            continue  # it has no piece for some of the characters
        expected = pieces.encode(text, out_type=str)
        found = tokenizer.tokenize(text)
        if found != expected:
            raise InputError(
                f"data.tokenizer.path {str(model.parent)!r}: transformers reads its {model.name} as"
                f" {type(tokenizer).__name__}, which makes {found} of {text!r}, and the model"
                f" itself {expected}: name the class of its model in tokenizer_config.json, such as"
                " tokenizer_class LlamaTokenizer, or give a folder with a tokenizer.json"
            )


def _wrap(backend: Any, use_regex: bool) -> Fast:
    """Returns a byte-level model of `tokenizers` as a transformers tokenizer."""
    from tokenizers import decoders, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)


def _first(texts: Iterator[str], num_bytes: int) -> Iterator[str]:
    for text in texts:
        if num_bytes <= 0:
            return
        yield text
        num_bytes -= len(text.encode())
