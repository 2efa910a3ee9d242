"""The language module without a Trainer, in every architecture of configs/model, and an output
layer alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from trainer_dev.module import SMALL_DEEPSEEK_V3, LanguageModule

from dist_template.text.model.head import without_head
from tests.support.runs import SHIPPED

ARCHITECTURES = {"deepseek_v3": SMALL_DEEPSEEK_V3} | {
    path.stem: yaml.safe_load(path.read_text())["model"]["architecture"]
    for path in SHIPPED.glob("model/*.yaml")
}


class Standalone(LanguageModule):
    """The module with data of fixed size, without a Trainer."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(vocab_size=50, eos_token_id=0, seq_len=16)


def build(seed: int = 0, **options: Any) -> LanguageModule:
    torch.manual_seed(seed)
    module = Standalone(**options)
    module.model = module.build_model(module.data)
    return module


def hidden_states(model: Any, forward: Callable[[], Tensor]) -> Tensor:
    with without_head(model) as result:
        return result(forward())


class Head(nn.Module):
    """An embedding and an output layer with the same weight; `cap` bounds the logits as Gemma
    does."""

    def __init__(self, vocabulary: int, width: int, cap: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.embedding.weight
        self.cap = cap

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.output(torch.tanh(self.embedding(tokens)))
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits
