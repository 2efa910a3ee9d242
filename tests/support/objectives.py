"""Objectives of a package, one of tokens and one of pairs: docs/extend.md has the first."""

import torch.nn.functional as F
from torch import Tensor

from dist_template.ranges import NonNegativeFloat, PositiveFloat, Share
from dist_template.text import NextToken, Pairs


class Smoothed(NextToken):
    """Label smoothing (arXiv:1512.00567, section 7), and a penalty on the logarithm of the
    softmax's normalizer (arXiv:2204.02311, section 5).

    Args:
        smoothing: Weight of the uniform distribution in the target.
        penalty: Weight of the squared logarithm."""

    def __init__(self, smoothing: Share = 0.1, penalty: NonNegativeFloat = 1e-4) -> None:
        self.smoothing = smoothing
        self.penalty = penalty

    def blend(self, sums: dict[str, Tensor], logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits, is_masked = logits.float(), labels == -100
        normalizer = logits.logsumexp(-1).masked_fill(is_masked, 0.0)
        uniform = normalizer - logits.mean(-1).masked_fill(is_masked, 0.0)
        minimized = (1 - self.smoothing) * sums["loss"] + self.smoothing * uniform.sum()
        minimized = minimized + self.penalty * normalizer.square().sum()
        return {"objective": minimized, **sums, "normalizer": normalizer.sum()}


class Hinge(Pairs):
    """The chosen answer's score is to be larger by a margin (arXiv:2305.10425).

    Args:
        beta: Scale of the rewards."""

    def __init__(self, beta: PositiveFloat = 0.1) -> None:
        self.beta = beta

    def losses(self, scores: Tensor) -> Tensor:
        return F.relu(1 - self.beta * (scores[:, 0] - scores[:, 1]))
