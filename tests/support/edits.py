"""Edits that are right: `rehearse` must not raise an alarm on any of them.

Each function edits this process's package; a rehearsal's workers call it before they train.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trainer_dev.module import LanguageModule
from transformers.modeling_outputs import CausalLMOutput

from tests.support.faults import after_configure_model


def edits_of_the_module() -> None:
    """Dropout, frozen layers, an unused head, buffers, an auxiliary loss, an optimizer, an average.

    Tied weights are a key of the architecture.
    """
    build = LanguageModule.build_model

    def build_model(self: Any, data: Any) -> Any:
        model: Any = build(self, data)
        blocks = model.model.layers
        blocks[0].requires_grad_(False)
        blocks[1].drop = nn.Dropout(0.1)
        blocks[1].mlp.register_forward_hook(lambda module, args, output: blocks[1].drop(output))
        model.reward_head = nn.Linear(model.config.hidden_size, 1)
        return model

    def loss(self: Any, logits: Tensor, labels: Tensor, cross_entropy: Tensor) -> Tensor:
        counted = labels.flatten() != -100
        return cross_entropy + 1e-3 * logits.flatten(0, 1).logsumexp(-1).square() * counted

    def configure_optimizers(self: Any) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)

    def optimizer_step(self: Any, *args: Any, **kwargs: Any) -> None:
        L.LightningModule.optimizer_step(self, *args, **kwargs)
        self.average.lerp_(self.model.model.norm.weight.detach(), 0.1)
        self.num_steps += 1

    def change(self: Any) -> None:
        self.register_buffer("average", torch.ones_like(self.model.model.norm.weight))
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(3), persistent=False)

    after_configure_model(change)()
    for method in (build_model, loss, configure_optimizers, optimizer_step):
        setattr(LanguageModule, method.__name__, method)


class Plain(nn.Module):
    """No transformers model, with gradient checkpointing of its own."""

    def __init__(self, vocab_size: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + F.gelu(checkpoint(block, hidden, use_reentrant=False))
        return CausalLMOutput(logits=self.head(hidden))


def plain_module() -> None:
    """And `forward` with arguments of one's own."""

    def forward(self: Any, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits

    def sums_of(self: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.sums(self(batch["input_ids"]), batch["labels"])

    LanguageModule.build_model = lambda self, data: Plain(data.vocab_size)
    LanguageModule.forward = forward  # ty: ignore[invalid-assignment]
    LanguageModule.sums_of = sums_of
