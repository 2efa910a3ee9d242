"""Reward models: a head in place of the output layer scores answers, the chosen one higher than the
rejected one (Bradley and Terry).

Shapes: P pairs of a micro-batch, B sequences, T tokens of a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ...parallel.configured import without_effect
from ..model.reward import every_reward, reward_model
from .objective import Batch, Sums, source_kind
from .pairs import KEY, OF_SCORES, Preference, difference, positions_inside, with_rewards

if TYPE_CHECKING:
    from ...parallel.configured import Configured


class Reward(Preference):
    """Trains a reward model."""

    has_reference = False
    reads_ends = True  # an answer's reward is read at its last token
    reads = frozenset({"loss"})
    no_text: ClassVar[str] = (
        "a reward model scores answers and generates none: evaluate it, or serve it for /pooling"
    )
    task: ClassVar[str] = "text-classification"

    def refusals(self, setup: Configured) -> Iterator[str]:
        yield from super().refusals(setup)
        reason = "a reward model is compared with no reference: set another model.preference.loss"
        yield from without_effect(KEY, self.config, {"beta"}, reason)
        if source_kind(setup.data) == "texts":
            yield "model.preference.loss reward learns from pairs: set data.source Preferences"

    def rate_share(self, steps: float) -> float:
        return OF_SCORES

    def extend(self, module: Any, network: nn.Module, data: Any) -> nn.Module:
        return reward_model(network, data)

    def values(self, module: Any, batch: Batch) -> Sums:
        rewards = _rewards(module, batch)
        return with_rewards(self.losses(rewards), rewards)

    def losses(self, scores: Tensor) -> Tensor:
        return -F.logsigmoid(difference(scores))


def _rewards(module: Any, batch: Batch) -> Tensor:
    """Returns the rewards (P, 2): the head's output at the last token that is not padding, as
    transformers reads it."""
    with every_reward(module.model):
        outputs = module(batch).float().flatten()  # (B x T,)
    inside, position = positions_inside(batch)
    is_text = batch["input_ids"].flatten() != module.model.config.get_text_config().pad_token_id
    return outputs[(position * (inside & is_text)).amax(-1)]
