"""Compares an exported model, loaded from its folder, with the trained one over 100 prompts.

The trained model generates greedily without a key-value cache. The exported one gets the same
tokens one by one, with its cache, so that equal logits are equal generations.
Shapes: N prompts, T tokens of a prompt, G generated tokens, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....errors import InputError
from ...rehearse.compare import first_difference
from ...rehearse.forward_hooks import ForwardHooks
from .trained import Trained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTS, LENGTH, GENERATED, AT_ONCE = 100, 24, 8, 20
OTHER = "the exported folder is not what was trained"
EXACT = 1e-5  # largest difference of float32 logits, relative to the largest logit and to 1
CACHED = 1e-3  # the most that the trained model's own cache may add to it
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
        texts = getattr(data, "prompts", None) or []
    else:
        starts = np.linspace(0, len(held_out) - LENGTH, number).astype(int)
        windows = np.lib.stride_tricks.sliding_window_view(held_out, LENGTH)[starts].tolist()
        texts = data.text_tokenizer.batch_decode(windows, skip_special_tokens=True)
    return list(filter(None, texts))


class Gate:
    """Keeps a trained model's outputs for prompts; the model itself may be freed."""

    def __init__(self, trained: Trained) -> None:
        model, self.tokenizer = trained.model, trained.tokenizer
        self.texts = prompts_of(trained.data) if self.tokenizer else []
        room = getattr(model.config, "max_position_embeddings", None) or LENGTH + GENERATED
        ids = list(map(self.tokenizer.encode, self.texts)) if self.texts else []
        self.length = max(1, min([room - GENERATED, LENGTH, *map(len, ids)]))
        if ids:
            prompts = torch.tensor([each[: self.length] for each in ids])
        else:
            prompts = torch.arange(self.length).repeat(2, 1)
        self.tokens, self.logits, self.loss = self._run(model, prompts, cached=False)
        # Recurrent layers compute a prompt and a single token by different algorithms (Qwen3.5).
        cached = self._run(model, self.tokens, cached=True)[1]
        self.rounding = (cached - self.logits).abs().max().item()
        self.layers = _layers(model, self.tokens[:1])

    def check(self, exported: Trained, dtype: str) -> str:
        """Returns in words how far `exported`, loaded from its folder, is from the trained model.

        Raises:
            InputError: it has other tokens, another chat template or type than `dtype`, or other
                logits; the message names the first layer that differs.
        """
        model, tokenizer, is_exact = exported.model, exported.tokenizer, dtype == "float32"
        for text in self.texts:
            if tokenizer.encode(text) != self.tokenizer.encode(text):
                raise InputError(f"{OTHER}: its tokenizer gives other tokens for {text[:30]!r}")
        if tokenizer and (chat := _chat(tokenizer)) != (expected := _chat(self.tokenizer)):
            raise InputError(f"{OTHER}: its chat template gives {chat!r}, not {expected!r}")
        is_cast = dtype != "int8" and not hasattr(model, "peft_config")
        if is_cast and str(model.dtype) != f"torch.{dtype}":
            raise InputError(f"{OTHER}: its weights are {model.dtype}, and --dtype is {dtype}")
        first, where = "", "in a graph or model with other layers"
        layers = _layers(model, self.tokens[:1]) if isinstance(model, nn.Module) else {}
        if layers.keys() == self.layers.keys():  # neither merged nor converted
            first = first_difference(self.layers, layers, 0.0 if is_exact else 0.5)
            where = f"first at {first}" if first else "with its cache, and no layer without one"
        if is_exact and first:
            raise InputError(f"{OTHER}: the first layer that differs is {first}")
        _, logits, loss = self._run(model, self.tokens, cached=True)
        change, scale = logits - self.logits, max(1.0, self.logits.abs().max().item())
        largest = change.abs().max().item()
        if is_exact:
            allowed = max(EXACT * scale, min(2 * self.rounding, CACHED * scale))
            is_equal, worse = largest <= allowed, ""
        else:
            is_equal = (change.norm() / self.logits.norm()).item() <= ROUNDING[dtype]
            worse = f", loss {loss - self.loss:+.4f} nats per token"
        if not is_equal:
            raise InputError(f"{OTHER}: its logits differ by up to {largest:.1e}, {where}")
        equal = (logits.argmax(-1) == self.tokens[:, self.length :]).float().mean().item()
        over = f"over {len(logits)} prompts, {equal:.1%} of the greedy tokens equal{worse}"
        return f"largest difference to the trained model's logits {largest:.1e} {over}"

    @torch.no_grad()
    def _run(self, model: Any, tokens: Tensor, cached: bool) -> tuple[Tensor, Tensor, float]:
        """Returns (N, T + G) tokens, (N, G, V) logits of the last G, and the loss of the prompts.

        `tokens` are prompts, to which the model adds the rest greedily, or all of them."""
        done, kept, loss = [], [], 0.0
        for part in tokens.split(AT_ONCE):
            cache, seen, logits = None, 0, []
            for end in range(self.length, self.length + GENERATED):
                given = part[:, seen:end]
                output = model(input_ids=given, past_key_values=cache, use_cache=cached)
                logits.append(output.logits[:, -1:].float())
                if end == self.length:
                    guesses = output.logits[:, :-1].float().flatten(0, 1)
                    loss += F.cross_entropy(guesses, given[:, 1:].flatten(), reduction="sum").item()
                if end == part.shape[1]:
                    part = torch.cat([part, logits[-1].argmax(-1)], 1)
                if cached:
                    cache, seen = output.past_key_values, end
            done.append(part)
            kept.append(torch.cat(logits, 1))
        return torch.cat(done), torch.cat(kept), loss / (len(tokens) * max(1, self.length - 1))


@torch.no_grad()
def _layers(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    hooks = ForwardHooks(model)
    model(input_ids=tokens, use_cache=False)
    hooks.remove()
    return hooks.tensors


def _chat(tokenizer: PreTrainedTokenizerBase) -> str:
    if not getattr(tokenizer, "chat_template", None):
        return ""
    return str(tokenizer.apply_chat_template(CHAT, tokenize=False))
