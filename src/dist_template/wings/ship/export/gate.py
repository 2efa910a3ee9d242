"""Compares an exported model, loaded from its folder, with the trained one over 100 prompts.

Both get the same tokens; the logits of the last positions of each prompt are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ....errors import InputError
from ....progress import Progress
from ....text.model.causal_lm import auto_class
from ....text.model.mtp import NAME as MODULES
from ....text.model.published import PublishedWeights
from .trained import Trained

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

PROMPTS, LENGTH, COMPARED, AT_ONCE = 100, 24, 8, 20
SHAPES = ((1, 1), (1, 7), (3, 20))  # rows and tokens that a graph with dynamic shapes must take
OTHER = "the exported folder is not what was trained"
EXACT = 1e-5  # largest difference of float32 logits, relative to the largest logit and to 1
# Of smaller types: norm of the logits' difference, relative to their norm.
ROUNDING = {"float16": 0.02, "bfloat16": 0.1, "int8": 0.5}
CHAT = [
    {"role": "user", "content": "A message of the user."},
    {"role": "assistant", "content": "A message of the assistant."},
]


def prompts_of(data: Any, number: int = PROMPTS) -> list[str]:
    """Returns excerpts of the validation split, evenly spaced; else data.prompts."""
    corpus = getattr(data, "corpus", None)
    held_out = corpus.tokens("validation") if corpus else np.empty(0)
    if len(held_out) <= LENGTH:
        texts = getattr(data, "prompts", None)
    else:
        starts = np.linspace(0, len(held_out) - LENGTH, number).astype(int)
        windows = np.lib.stride_tricks.sliding_window_view(held_out, LENGTH)[starts].tolist()
        texts = data.text_tokenizer.batch_decode(windows, skip_special_tokens=True)
    if texts is None:
        return []
    return [text for text in texts if text]


class Gate:
    """Keeps a trained model's logits for prompts; the model itself may be freed. `shapes`: rows and
    tokens for which further logits are compared."""

    def __init__(self, trained: Trained, shapes: tuple[tuple[int, int], ...] = ()) -> None:
        self.tokenizer = trained.tokenizer
        self.texts = prompts_of(trained.data) if self.tokenizer else []
        ids = [self.tokenizer.encode(text) for text in self.texts]
        if ids:
            length = max(1, min(LENGTH, *map(len, ids)))
            self.tokens = torch.tensor([each[:length] for each in ids])
        else:
            self.tokens = torch.arange(LENGTH).repeat(2, 1)
        self.logits = torch.empty(0)
        if not trained.stored:
            self.logits = _logits(trained.model, self.tokens, "export: logits of the checkpoint")
        self.shaped: list[tuple[Tensor, Tensor]] = []  # tokens, and logits of all positions
        for rows, length in shapes:
            tokens = self.tokens.flatten().repeat(rows * length)[: rows * length]
            tokens = tokens.view(rows, length)
            self.shaped.append((tokens, _logits(trained.model, tokens, compared=length)))

    def check(self, exported: Trained, dtype: str) -> str:
        """Returns in words how far `exported`, loaded from its folder, is from the trained model.
        Raises InputError if it has other tokens, another chat template or type than `dtype`, or
        other logits."""
        model = exported.model
        self._check_tokenizer(exported.tokenizer)
        is_cast = dtype != "int8" and not hasattr(model, "peft_config")
        if is_cast and str(model.dtype) != f"torch.{dtype}":
            raise InputError(f"{OTHER}: its weights are {model.dtype}, and --dtype is {dtype}")
        logits = _logits(model, self.tokens, "export: logits of the folder")
        largest = _difference(logits, self.logits, dtype)
        for tokens, expected in self.shaped:
            found = _logits(model, tokens, compared=tokens.shape[1])
            largest = max(largest, _difference(found, expected, dtype))
        over = f"over {len(logits)} prompts"
        if self.shaped:
            shapes = [f"{len(tokens)} x {tokens.shape[1]}" for tokens, _ in self.shaped]
            over += f" and {', '.join(shapes)} tokens"
        if logits.shape[-1] > 1:  # else they are rewards
            equal = (logits.argmax(-1) == self.logits.argmax(-1)).float().mean().item()
            over += f", {equal:.1%} of the greedy tokens equal"
        return f"largest difference to the trained model's logits {largest:.1e} {over}"

    def check_weights(self, trained: Trained, dtype: str, folder: Path) -> str:
        """Compares each weight, as transformers loads it, with the checkpoint's, for a model that
        does not fit in memory. Raises InputError as `check` does, and for another configuration."""
        from transformers import AutoConfig, AutoTokenizer

        if self.tokenizer:
            self._check_tokenizer(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config.name_or_path = trained.model.config.name_or_path
        found, expected = config.to_dict(), trained.model.config.to_dict()
        if found != expected:
            names = [name for name, value in expected.items() if found.get(name) != value]
            raise InputError(f"{OTHER}: its configuration has other {', '.join(names)}")
        kind = auto_class(config, with_modules=hasattr(trained.model, MODULES))
        published = PublishedWeights(str(folder), kind, config)
        for name in published.differing(trained.stored, getattr(torch, dtype)):
            raise InputError(f"{OTHER}: its {name} has other values")
        return f"each of {len(trained.stored)} weights equals the checkpoint's"

    def _check_tokenizer(self, tokenizer: Any) -> None:
        for text in self.texts:
            if tokenizer.encode(text) != self.tokenizer.encode(text):
                raise InputError(f"{OTHER}: its tokenizer gives other tokens for {text[:30]!r}")
        if tokenizer:
            found, expected = _chat(tokenizer), _chat(self.tokenizer)
            if found != expected:
                raise InputError(f"{OTHER}: its chat template gives {found!r}, not {expected!r}")


def _difference(logits: Tensor, expected: Tensor, dtype: str) -> float:
    """Returns the largest difference. Raises InputError if it is more than rounding."""
    change = logits - expected
    largest, scale = change.abs().max().item(), max(1.0, expected.abs().max().item())
    if dtype == "float32":
        is_equal = largest <= EXACT * scale
    else:
        is_equal = (change.norm() / expected.norm()).item() <= ROUNDING[dtype]
    if not is_equal:
        raise InputError(f"{OTHER}: its logits differ by up to {largest:.1e}")
    return largest


@torch.no_grad()
def _logits(
    model: Any, tokens: Tensor, title: str = "export: logits", compared: int = COMPARED
) -> Tensor:
    """Returns the logits of the last positions, which have the most context."""
    parts, found = tokens.split(AT_ONCE), []
    for part in Progress(title, "batches", len(parts)).over(parts):
        found.append(model(input_ids=part, use_cache=False).logits[:, -compared:].float())
    return torch.cat(found)


def _chat(tokenizer: PreTrainedTokenizerBase) -> str:
    if not getattr(tokenizer, "chat_template", None):
        return ""
    return str(tokenizer.apply_chat_template(CHAT, tokenize=False))
