"""The loss of preferences: chosen answers become more probable than rejected ones, compared with a
reference, the model before training.

The distance of kto, which its paper takes from a micro-batch, is that of the optimizer step before,
over all its micro-batches and ranks: a micro-batch's would depend on `data.micro_batch_size`, on
the number of ranks and on who has which rows. At the first step the model is its reference, and the
distance is 0.

The reference is the model with its adapters switched off, or a frozen copy, placed by the same
strategy. Checkpoints contain the copy's hash only.

Shapes: P pairs of a micro-batch, B sequences, T tokens of a sequence, V vocabulary."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ...checkpoint.frozen import FrozenHash, exclude_frozen
from ...compat.transformers import without_adapters
from ...parallel.place import place
from ..batches.rows import PAIRS
from ..model.reward import every_reward

DISTANCE = "distance._extra_state"  # in a module's state dict, of kto


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
    beta: float = 0.1
    margin: float = 0.5
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    @property
    def has_reference(self) -> bool:
        return self.loss in ("dpo", "ipo", "kto")


def has_pairs(data: object) -> bool:
    return getattr(getattr(data, "source", None), "pairs", False)


def build_reference(module: Any) -> nn.Module:
    """Returns a frozen copy of the model at the start."""
    model = module.build_model(module.data).requires_grad_(False)
    module.frozen_reference = {"name": type(model).__name__}
    return model


def needs_copy(module: Any) -> bool:
    """Returns whether the loss needs a reference, and no adapters can be switched off."""
    has_base = module.adapter is not None and not module.adapter.trainable
    return has_pairs(module.data) and module.preference.has_reference and not has_base


def add_reference(module: Any, build: Callable[[], nn.Module]) -> None:
    """Gives `module` the frozen model of `build` as its `reference`, placed by its own strategy."""
    # Lightning warns of modules in eval mode, in which only the reference's passes are
    frozen = FrozenHash()
    module.reference = place(build, module.trainer.strategy, module.blocks, frozen).train()
    module.frozen_reference = frozen.entry(module.frozen_reference["name"])
    exclude_frozen(module, "reference.")


def pair_values(module: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns values (P,) of the pairs of a micro-batch: the loss, and as metrics the rewards. A
    reward is beta times the log-ratio of an answer's probabilities, model to reference. Equal ones
    are half right."""
    config = module.preference
    reference: Tensor | float = 0.0
    if config.has_reference:
        with as_reference(module), torch.no_grad():
            reference, _ = _log_probabilities(module, batch)
        reshard(module.reference)
    if config.loss == "reward":
        return _values(_rewards(module, batch))
    scores, lengths = _log_probabilities(module, batch)  # (P, 2) each
    scores = scores - reference
    if config.loss == "kto":
        rewards, is_good = config.beta * scores, batch[PAIRS][:, 3] == 1
        if module.training:
            module.distance.add(rewards[:, 1])
        return _rating_values(config, rewards, is_good, module.distance.value)
    if config.loss != "dpo":
        scores = scores / lengths
    difference = scores[:, 0] - scores[:, 1]
    if config.loss == "ipo":
        losses = (difference - 1 / (2 * config.beta)).square()
    elif config.loss == "orpo":
        against = (
            -scores.expm1()
        ).log()  # of the probability that the answer is another one, per token
        log_odds = difference - against[:, 0] + against[:, 1]
        losses = -scores[:, 0] - config.beta * F.logsigmoid(log_odds)
    else:
        margin = config.margin if config.loss == "simpo" else 0.0
        losses = -F.logsigmoid(config.beta * difference - margin)
    return _values(config.beta * scores, losses)


def _values(rewards: Tensor, losses: Tensor | None = None) -> dict[str, Tensor]:
    """Returns `pair_values` of rewards (P, 2); without losses, -log sigmoid(chosen - rejected)
    (Bradley and Terry)."""
    if losses is None:
        losses = -F.logsigmoid(rewards[:, 0] - rewards[:, 1])
    chosen, rejected = rewards.detach().unbind(1)
    return {
        "loss": losses,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margin": chosen - rejected,
        "rewards/accuracy": (1 + (chosen - rejected).sign()) / 2,
    }


def _rating_values(
    config: PreferenceConfig, rewards: Tensor, is_good: Tensor, distance: Tensor
) -> dict[str, Tensor]:
    """Returns `pair_values` of rated answers. `rewards` (P, 2) are of the answer, and of another
    one to its prompt. A margin is positive where the reward is on the right side of the
    distance."""
    margin = torch.where(is_good, 1, -1) * (rewards[:, 0] - distance)
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


def _log_probabilities(module: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the log-probability (P, 2) of each pair's answers, and their numbers of tokens."""
    labels = batch["labels"].flatten()
    logits = module(batch).float().flatten(0, 1)
    log_probabilities = -F.cross_entropy(logits, labels, reduction="none")  # 0 for label -100
    inside, _ = _inside(batch)
    return (inside * log_probabilities).sum(-1), (inside & (labels != -100)).sum(-1)


def _inside(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns whether each position is in each sequence of the pairs (P, 2, B x T), and the
    positions (B x T,)."""
    labels = batch["labels"]
    position = torch.arange(labels.numel(), device=labels.device)
    edges = batch[PAIRS][:, :3].unsqueeze(-1)  # (P, 3, 1)
    return (edges[:, :2] <= position) & (position < edges[:, 1:]), position


def _rewards(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Returns the rewards (P, 2): the head's output at the last token that is not padding, as
    transformers reads it."""
    with every_reward(module.model):
        outputs = module(batch).float().flatten()  # (B x T,)
    inside, position = _inside(batch)
    is_text = batch["input_ids"].flatten() != module.model.config.get_text_config().pad_token_id
    return outputs[(position * (inside & is_text)).amax(-1)]


@contextmanager
def as_reference(module: Any) -> Generator[None]:
    """Inside, a forward pass of `module` is the reference's, without dropout."""
    model, counts = module.model, module.balancer.counts_now
    module.balancer.counts_now = False
    module.model = reference = model if module.reference is None else module.reference
    training = reference.training
    reference.eval()
    try:
        with without_adapters(reference):
            yield
    finally:
        reference.train(training)
        module.model, module.balancer.counts_now = model, counts


def reshard(reference: nn.Module | None) -> None:
    """Frees the outermost unit, which FSDP2 keeps for a backward pass."""
    for unit in reference.modules() if reference is not None else ():
        if isinstance(unit, FSDPModule):
            unit.reshard()
