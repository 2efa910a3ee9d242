"""Distillation: a model learns the distribution of a frozen teacher, token by token
(arXiv:1503.02531).

The teacher is placed by the run's own strategy, as the reference of preferences is, and checkpoints
contain its hash only. For each micro-batch:

    1. the teacher's hidden states, without gradients
    2. the model's hidden states
    3. both output layers run on one chunk of tokens at a time, so no (B, T, V) of either exists;
       of each chunk, `TextModule.sums` and `blend` as in next_token.py, then `with_teacher`

Shapes: B sequences, T tokens of a sequence, V vocabulary, N tokens of a chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from ...errors import InputError
from ...model.metrics import NOT_COUNTED
from ...ranges import NotBlank, PositiveFloat, Share
from ..model.causal_lm import causal_lm, causal_lm_config
from ..model.head import ChunkedLoss, head_of, without_head
from ..model.reward import refuse_reward_model
from ..tokenizers import read_tokenizer
from .frozen import as_frozen, reshard
from .next_token import NextToken
from .objective import Batch, Sums

__all__ = ["Distillation"]


KEY = "model.distillation"


@dataclass
class DistillationConfig:
    """A teacher whose distribution is learned beside the data's tokens, or in place of them.

    Args:
        teacher: A local folder or hub name of weights with the same tokenizer.
        weight: Share of the divergence from the teacher in the loss; the rest is cross-entropy.
        temperature: Divides both models' logits; the divergence is multiplied by its square."""

    teacher: Annotated[str, NotBlank("a folder or a hub name of weights")]
    weight: Share = 1.0
    temperature: PositiveFloat = 1.0


class Distillation(NextToken):
    """Cross-entropy, and the divergence from a frozen teacher."""

    key: ClassVar[str] = KEY
    # The teacher's pass comes first, and a pipeline has one pass.
    is_one_pass = False
    frozen_weights = ("distillation.teacher",)
    no_better = "The teacher is no better: evaluate it on the same data."

    def __init__(self, config: DistillationConfig) -> None:
        self.config = config

    def fixed_settings(self) -> dict[str, object]:
        return {self.key: [self.config.weight, self.config.temperature]}

    def frozen_model(self, module: Any) -> Callable[[], nn.Module]:
        return partial(_build_teacher, module)

    def chunked_loss(self, module: Any) -> ChunkedLoss:
        return ChunkedLoss(
            module.model, module.sums, module.loss_chunk, module.reference, self.with_teacher
        )

    def frozen_parameters(self, module: Any, data: Any, trained: int) -> tuple[int, int]:
        name = self.config.teacher
        with torch.device("meta"):
            teacher = causal_lm(_teacher_config(module, data, name), name, data.vocab_size)
        number = sum(parameter.numel() for parameter in teacher.parameters())
        return number, number

    def sums(self, module: Any, batch: Batch) -> Sums:
        with as_frozen(module), torch.no_grad(), without_head(module.model) as hidden_states:
            expected = hidden_states(module(batch))
        with without_head(module.model) as hidden_states:
            hidden = hidden_states(module(batch))
        sums = module.chunked_loss(hidden, batch["labels"], expected)
        reshard(module.reference)
        return sums

    def with_teacher(self, sums: Sums, logits: Tensor, labels: Tensor, expected: Tensor) -> Sums:
        """Returns sums of a chunk with `objective`, what is minimized, as the first. Logits and the
        teacher's, `expected`, are (1, N, V); published ones may be padded."""
        config = self.config
        sums = self.blend(sums, logits, labels)
        size = min(logits.shape[-1], expected.shape[-1])
        student = (logits[..., :size].float() / config.temperature).log_softmax(-1)
        teacher = (expected[..., :size].float() / config.temperature).log_softmax(-1)
        divergences = (teacher.exp() * (teacher - student)).sum(-1)  # (1, N)
        divergence = divergences.masked_fill(labels == NOT_COUNTED, 0.0).sum()
        minimized = next(iter(sums.values()))
        objective = (1 - config.weight) * minimized
        objective = objective + config.weight * config.temperature**2 * divergence
        result = {"objective": objective, "divergence": divergence.detach()}
        for name, value in sums.items():
            if name != "objective":
                result[name] = value.detach()
        return result


def _build_teacher(module: Any) -> nn.Module:
    """Returns the teacher, frozen; on ranks other than 0 without values. Raises InputError if it
    cannot be loaded, or has another vocabulary, or if it or the module's model has no output
    layer."""
    data, name = module.data, module.distillation.teacher
    config = _teacher_config(module, data, name)
    try:
        vocab_size = config.get_text_config().vocab_size
        if vocab_size < data.vocab_size or not _has_tokenizer(name, data.text_tokenizer):
            raise InputError(
                f"model.distillation.teacher {name!r} has another vocabulary ({vocab_size:,}"
                f" tokens) than data.tokenizer ({data.vocab_size:,}): give a teacher with the same"
                " tokenizer"
            )
        model = causal_lm(config, name, data.vocab_size).requires_grad_(False)
        refuse_reward_model(model, name)
        _require_head(module.model, "the model")
        _require_head(model, f"model.distillation.teacher {name!r}")
    except InputError as error:
        raise InputError(
            str(error).replace("model.pretrained", "model.distillation.teacher")
        ) from error
    module.frozen_reference = {"name": name}
    return model


def _require_head(model: nn.Module, name: str) -> None:
    if head_of(model) is None:
        raise InputError(
            f"{name} ({type(model).__name__}) has no output layer (get_output_embeddings), so its"
            " distribution cannot be distilled: remove model.distillation"
        )


def _teacher_config(module: Any, data: Any, name: str) -> Any:
    try:
        return causal_lm_config({}, name, getattr(module, "attention", None), data)
    except InputError as error:
        raise InputError(str(error).replace("model.pretrained", f"{KEY}.teacher")) from error


def _has_tokenizer(name: str, tokenizer: Any) -> bool:
    """Returns whether the teacher's tokenizer has the same tokens; true, with a note, where it has
    none."""
    try:
        of_teacher = read_tokenizer(name)
    except Exception:  # OSError, ValueError, TypeError and others, by its class
        of_teacher = None
    if of_teacher is None:
        rank_zero_only(print)(
            f"model.distillation.teacher {name!r} has no tokenizer that can be read: only the"
            " sizes of the vocabularies were compared"
        )
        return True
    return of_teacher.get_vocab() == tokenizer.get_vocab()
