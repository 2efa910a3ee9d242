"""Ratings: answers that were found good become more probable, those found bad less (KTO,
arXiv:2402.01306).

The paper takes the distance from the reference of a micro-batch. Here it is that of the optimizer
step before, over all its micro-batches and ranks: a micro-batch's would depend on
`data.micro_batch_size`, on the number of ranks and on who has which rows. At the first step the
model is its reference, and the distance is 0.

Shapes: P rated answers of a micro-batch."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..batches.rows import PAIRS
from .objective import Batch, Source, Sums
from .pairs import Preference

DISTANCE = "distance._extra_state"  # in a module's state dict


class Kto(Preference):
    """Rated answers, each compared with the model's distance from the reference."""

    learns_from: ClassVar[Source] = "ratings"
    reads = Preference.reads | {"desirable_weight", "undesirable_weight"}

    def add_state(self, module: Any) -> None:
        module.distance = Distance()
        module.distance.may_be_missing(module)

    def values_of(self, module: Any, scores: Tensor, lengths: Tensor, batch: Batch) -> Sums:
        """The scores (P, 2) are of the answer, and of another one to its prompt. A margin is
        positive where the reward is on the right side of the distance."""
        rewards = self.beta * scores
        is_good = batch[PAIRS][:, 3] == 1
        if module.training:
            module.distance.add(rewards[:, 1])
        margin = torch.where(is_good, 1, -1) * (rewards[:, 0] - module.distance.value)
        config = self.config
        weights = torch.where(is_good, config.desirable_weight, config.undesirable_weight)
        return {
            "loss": weights * (1 - margin.sigmoid()),
            "rewards/margin": margin.detach(),
            "rewards/accuracy": (1 + margin.detach().sign()) / 2,
        }


class Distance(nn.Module):
    """The model's distance from the reference (arXiv:2402.01306, z0): the mean reward of other
    answers to the prompts of the optimizer step before, if it is positive. Checkpoints have it."""

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.zeros(())
        self._sums = torch.zeros(2)  # of the present step: the rewards, and their number

    def add(self, rewards: Tensor) -> None:
        """Counts the rewards (P,) of a micro-batch's other answers."""
        sums = torch.stack([rewards.detach().sum(), rewards.new_tensor(len(rewards))])
        self._sums = self._sums.to(sums) + sums
        self.value = self.value.to(sums)

    def finish_step(self) -> None:
        """Takes the mean of the step's rewards, which the next one is compared with. Collective
        over all ranks."""
        if dist.is_initialized():
            dist.all_reduce(self._sums)
        mean = (self._sums[0] / self._sums[1].clamp(min=1)).clamp(min=0)
        self.value = torch.where(mean.isfinite(), mean, self.value)  # a step that was skipped
        self._sums = torch.zeros_like(self._sums)

    def get_extra_state(self) -> dict[str, float]:
        return {"value": self.value.item()}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.value = torch.tensor(state["value"], device=self.value.device)

    def may_be_missing(self, module: nn.Module) -> None:
        """Lets `module` load checkpoints from before they had the distance, which was a
        micro-batch's."""

        def accept(_: nn.Module, keys: Any) -> None:
            keys.missing_keys[:] = [name for name in keys.missing_keys if name != DISTANCE]

        module.register_load_state_dict_post_hook(accept)
