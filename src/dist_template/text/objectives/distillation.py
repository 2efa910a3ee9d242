"""Distillation: a model learns the distribution of a frozen teacher, token by token
(arXiv:1503.02531).

The teacher is placed by the run's own strategy, as the reference of preferences is, and checkpoints
contain its hash only. Both output layers run on one chunk of tokens at a time, so no (B, T, V) of
either exists.

Shapes: B sequences, T tokens of a sequence, V vocabulary, N tokens of a chunk."""

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from ...errors import InputError
from ...model.metrics import NOT_COUNTED
from ..model.causal_lm import causal_lm, causal_lm_config
from ..model.head import head_of, without_head
from ..model.reward import refuse_reward_model
from ..tokenizers import read_tokenizer
from .pairs import as_reference, reshard


@dataclass
class DistillationConfig:
    """A teacher whose distribution is learned beside the data's tokens, or in place of them.

    Args:
        teacher: A local folder or hub name of weights with the same tokenizer.
        weight: Share of the divergence from the teacher in the loss; the rest is cross-entropy.
        temperature: Divides both models' logits; the divergence is multiplied by its square."""

    teacher: str
    weight: float = 1.0
    temperature: float = 1.0


def build_teacher(module: Any) -> nn.Module:
    """Returns the teacher, frozen; on ranks other than 0 without values. Raises InputError if it
    cannot be loaded, or has another vocabulary, or if it or the module's model has no output
    layer."""
    data, name = module.data, module.distillation.teacher
    try:
        config = causal_lm_config({}, name, getattr(module, "attention", None), data)
        vocab_size = config.get_text_config().vocab_size
        if vocab_size < data.vocab_size or not _has_tokenizer(name, data.text_tokenizer):
            raise InputError(
                f"model.distillation.teacher {name!r} has another vocabulary ({vocab_size:,}"
                f" tokens) than data.tokenizer ({data.vocab_size:,}): give a teacher with the same"
                " tokenizer"
            )
        model = causal_lm(config, name, data.vocab_size).requires_grad_(False)
        refuse_reward_model(model, name)
        for key, each in (
            ("the model", module.model),
            (f"model.distillation.teacher {name!r}", model),
        ):
            if head_of(each) is None:
                what = (
                    f"{key} ({type(each).__name__}) has no output layer (get_output_embeddings),"
                    " so its"
                )
                raise InputError(
                    f"{what} distribution cannot be distilled: remove model.distillation"
                )
    except InputError as error:
        raise InputError(
            str(error).replace("model.pretrained", "model.distillation.teacher")
        ) from error
    module.frozen_reference = {"name": name}
    return model


def _has_tokenizer(name: str, tokenizer: Any) -> bool:
    """Returns whether the teacher's tokenizer has the same tokens; true, with a note, where it has
    none."""
    try:
        found = read_tokenizer(name)
    except Exception:  # OSError, ValueError, TypeError and others, by its class
        found = None
    if found is None:
        rank_zero_only(print)(
            f"model.distillation.teacher {name!r} has no tokenizer that can be read: only the"
            " sizes of the vocabularies were compared"
        )
        return True
    return found.get_vocab() == tokenizer.get_vocab()


def distilled_sums(module: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns `sums` over a micro-batch's tokens, with the blend of divergence and cross-entropy as
    the first."""
    with as_reference(module), torch.no_grad(), without_head(module.model) as hidden_states:
        expected = hidden_states(module(batch))
    with without_head(module.model) as hidden_states:
        hidden = hidden_states(module(batch))
    sums = module.chunked_loss(hidden, batch["labels"], expected)
    reshard(module.reference)
    return sums


def blended(
    config: DistillationConfig,
    sums: dict[str, Tensor],
    logits: Tensor,
    expected: Tensor,
    labels: Tensor,
) -> dict[str, Tensor]:
    """Returns sums of a chunk with `objective` as the first. Logits are (1, N, V); published ones
    may be padded."""
    size = min(logits.shape[-1], expected.shape[-1])
    student, teacher = (
        (each[..., :size].float() / config.temperature).log_softmax(-1)
        for each in (logits, expected)
    )
    divergences = (teacher.exp() * (teacher - student)).sum(-1)  # (1, N)
    divergence = divergences.masked_fill(labels == NOT_COUNTED, 0.0).sum()
    minimized = next(iter(sums.values()))
    objective = (1 - config.weight) * minimized + config.weight * config.temperature**2 * divergence
    others = {name: value.detach() for name, value in sums.items() if name != "objective"}
    return {"objective": objective, "divergence": divergence.detach(), **others}
