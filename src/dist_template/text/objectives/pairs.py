"""Preferences: a chosen answer becomes more probable than a rejected one, compared with a frozen
reference, the model before training.

A step of DPO, of which the others are variants:

    1. the reference's log-probabilities of both answers, without gradients (`has_reference`)
    2. the model's; the differences are scores (P, 2), or the model's own without a reference
    3. `losses` of the scores: here -log sigmoid(beta (chosen - rejected))
    4. rewards, beta times the scores, are metrics

The reference is the model with its adapters switched off, or a frozen copy (frozen.py). An
objective of a package overrides `losses`, and `has_reference` or `of_means`.

Shapes: P pairs of a micro-batch, B sequences, T tokens of a sequence, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...parallel.configured import without_effect
from ...ranges import NonNegativeFloat, PositiveFloat
from ..batches.rows import PAIRS
from .frozen import as_frozen, reshard
from .objective import Batch, Measure, Objective, Source, Sums, source_kind

if TYPE_CHECKING:
    from ...parallel.configured import Configured

__all__ = ["Pairs"]

KEY = "model.preference"
# Shares of a fine-tuning's learning rate. Published rewards and ORPO take about a third of it:
# OpenRLHF's 9e-6 for 8 B, ORPO's 8e-6 for 7 B (arXiv:2403.07691).
OF_SCORES = 1 / 3
# What moves away from a reference goes as far in few steps as in many: the rate falls with their
# number, from a quarter, above which held-out pairs got worse (docs/finetune.md), down to what
# thousands of steps take, 5e-7 for 8 B (Tulu 3, arXiv:2411.15124).
OF_PREFERENCES, LARGEST_SHARE, LEAST_SHARE = 5, 1 / 4, 1 / 50


@dataclass
class PreferenceConfig:
    """The loss of pairs, with data.source Preferences, or of rated answers, with Ratings.

    Args:
        loss: dpo (arXiv:2305.18290). ipo (arXiv:2310.12036), which bounds the difference. simpo
            (arXiv:2405.14734) and orpo (arXiv:2403.07691), which have no reference. kto
            (arXiv:2402.01306), of Ratings. ipo, simpo and orpo compare means per token. reward
            trains a reward model: a head in place of the output layer.
        beta: Scale of the rewards: a larger one keeps the model closer to the reference. Of orpo,
            the weight of the odds ratio beside the chosen answer's cross-entropy.
        margin: Of simpo alone: by how much the chosen answer's reward has to be larger.
        desirable_weight: Of kto: the weight of an answer that was found good.
        undesirable_weight: Of kto: of one that was found bad; weight times number should be
            alike."""

    loss: Literal["dpo", "ipo", "simpo", "orpo", "kto", "reward"] = "dpo"
    beta: PositiveFloat = 0.1
    margin: NonNegativeFloat = 0.5
    desirable_weight: NonNegativeFloat = 1.0
    undesirable_weight: NonNegativeFloat = 1.0


class Pairs(Objective):
    """Of two answers to a prompt the chosen one becomes more probable: define `losses`."""

    learns_from: ClassVar[Source] = "pairs"
    is_one_pass = False
    in_chunks = False  # log-probabilities are of all tokens of an answer
    is_cross_entropy = False
    unit: ClassVar[Literal["tokens", "documents"]] = "documents"
    measures = {
        "reward_accuracy": Measure("rewards/accuracy"),
        "reward_margin": Measure("rewards/margin"),
    }
    has_reference: ClassVar[bool] = True
    of_means: ClassVar[bool] = False  # whether scores are means per token, not sums
    beta: float = 0.1  # scale of the rewards

    def losses(self, scores: Tensor) -> Tensor:
        """Returns the losses (P,) of scores (P, 2), of the chosen and the rejected answers:
        log-probabilities, less the reference's."""
        raise NotImplementedError(f"{type(self).__name__} has no losses: define it")

    def rate_share(self, steps: float) -> float:
        return min(LARGEST_SHARE, max(OF_PREFERENCES / max(1, steps), LEAST_SHARE))

    # ---- the reference ---------------------------------------------------------------------------

    def frozen_model(self, module: Any) -> Callable[[], nn.Module] | None:
        return _copy_of(module) if self._needs_copy(module) else None

    def _needs_copy(self, module: Any) -> bool:
        """Returns whether there are no adapters that could be switched off."""
        has_base = module.adapter is not None and not module.adapter.trainable
        return self.has_reference and not has_base

    def frozen_parameters(self, module: Any, data: Any, trained: int) -> tuple[int, int]:
        return trained * self.has_reference, trained * self._needs_copy(module)

    # ---- a micro-batch ---------------------------------------------------------------------------

    def values(self, module: Any, batch: Batch) -> Sums:
        reference: Tensor | float = 0.0
        if self.has_reference:
            with as_frozen(module), torch.no_grad():
                reference, _ = log_probabilities(module, batch)
            reshard(module.reference)
        scores, lengths = log_probabilities(module, batch)  # (P, 2) each
        scores = scores - reference
        return self.values_of(module, scores, lengths, batch)

    def values_of(self, module: Any, scores: Tensor, lengths: Tensor, batch: Batch) -> Sums:
        """Returns `values` of scores (P, 2) of answers with `lengths` tokens."""
        if self.of_means:
            scores = scores / lengths
        return with_rewards(self.losses(scores), self.beta * scores)

    def sums(self, module: Any, batch: Batch) -> Sums:
        return {name: values.sum() for name, values in self.values(module, batch).items()}

    def count(self, batch: Batch) -> Tensor:
        # the last batch may be padded, so that all ranks have equally many
        return torch.full_like((batch["labels"] != -100).sum(), len(batch[PAIRS]))


def with_rewards(losses: Tensor, rewards: Tensor) -> Sums:
    """Returns values (P,) by name: the losses, and as metrics the rewards (P, 2) of the chosen and
    the rejected answers. Equal ones are half right."""
    chosen, rejected = rewards.detach().unbind(1)
    return {
        "loss": losses,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margin": chosen - rejected,
        "rewards/accuracy": (1 + (chosen - rejected).sign()) / 2,
    }


def log_probabilities(module: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the log-probability (P, 2) of each pair's answers, and their numbers of tokens."""
    labels = batch["labels"].flatten()
    logits = module(batch).float().flatten(0, 1)
    values = -F.cross_entropy(logits, labels, reduction="none")  # 0 for label -100
    inside, _ = positions_inside(batch)
    return (inside * values).sum(-1), (inside & (labels != -100)).sum(-1)


def positions_inside(batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns whether each position is in each sequence of the pairs (P, 2, B x T), and the
    positions (B x T,)."""
    labels = batch["labels"]
    position = torch.arange(labels.numel(), device=labels.device)
    edges = batch[PAIRS][:, :3].unsqueeze(-1)  # (P, 3, 1)
    return (edges[:, :2] <= position) & (position < edges[:, 1:]), position


def _copy_of(module: Any) -> Callable[[], nn.Module]:
    """Returns what builds a frozen copy of the model at the start."""

    def build() -> nn.Module:
        model = module.build_model(module.data).requires_grad_(False)
        module.frozen_reference = {"name": type(model).__name__}
        return model

    return build


# ---- the losses of `model.preference` ------------------------------------------------------------


class Preference(Pairs):
    """A loss that `model.preference.loss` names."""

    key: ClassVar[str] = KEY
    reads: ClassVar[frozenset[str]] = frozenset({"loss", "beta"})  # keys that the loss reads

    def __init__(self, config: PreferenceConfig) -> None:
        self.config = config
        self.beta = config.beta

    @property
    def label(self) -> str:
        return "data.source Preferences"

    def refusals(self, setup: Configured) -> Iterator[str]:
        source = source_kind(setup.data)
        if source == "texts":
            reason = "data.source yields no pairs: set Preferences there"
            yield from without_effect(KEY, self.config, {"beta"}, reason)
        for loss, keys in OWN_KEYS.items():
            if source != "texts" and not keys <= self.reads:
                reason = f"{KEY}.loss is {self.config.loss}: set {loss}"
                yield from without_effect(KEY, self.config, keys, reason)
        needs_ratings = self.learns_from == "ratings"
        if needs_ratings != (source == "ratings"):
            yield (
                "model.preference.loss kto and data.source Ratings need each other: set both, or"
                " neither"
            )

    def fixed_settings(self) -> dict[str, object]:
        return {f"{KEY}.beta": self.beta}


class Dpo(Preference):
    """Direct preference optimization (arXiv:2305.18290)."""

    def losses(self, scores: Tensor) -> Tensor:
        return -F.logsigmoid(self.beta * difference(scores))


class Ipo(Preference):
    """A squared loss, which bounds the difference (arXiv:2310.12036, equation 17)."""

    of_means = True

    def losses(self, scores: Tensor) -> Tensor:
        return (difference(scores) - 1 / (2 * self.beta)).square()


class Simpo(Preference):
    """Without a reference, and with a margin (arXiv:2405.14734)."""

    has_reference, of_means = False, True
    reads = Preference.reads | {"margin"}

    def losses(self, scores: Tensor) -> Tensor:
        return -F.logsigmoid(self.beta * difference(scores) - self.config.margin)


class Orpo(Preference):
    """The chosen answer's cross-entropy, and the odds ratio (arXiv:2403.07691)."""

    has_reference, of_means = False, True

    def losses(self, scores: Tensor) -> Tensor:
        # of the probability that the answer is another one, per token
        against = (-scores.expm1()).log()
        log_odds = difference(scores) - against[:, 0] + against[:, 1]
        return -scores[:, 0] - self.beta * F.logsigmoid(log_odds)

    def rate_share(self, steps: float) -> float:
        return OF_SCORES


OWN_KEYS = {  # loss: the keys that it alone reads
    "simpo": {"margin"},
    "kto": {field.name for field in fields(PreferenceConfig) if field.name.endswith("able_weight")},
}


def difference(scores: Tensor) -> Tensor:
    """Returns (P,) by how much the chosen answers' scores (P, 2) are larger."""
    return scores[:, 0] - scores[:, 1]
