"""Reward models: a language model whose output layer is replaced by a head with one output, the
reward.

transformers' classes for it end with ForSequenceClassification. They return the head's output at
the last token that is not padding; several sequences of a packed row need it at other tokens too.

Shapes: B sequences, T tokens of a sequence."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...compat.transformers import initialize
from ...errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

REWARDS = "ForSequenceClassification"  # how names of these classes end
HEAD = "score"  # their head; encoders, which have others, do not read text from left to right


def has_reward_head(config: PreTrainedConfig) -> bool:
    """Returns whether the weights of a configuration have such a head in place of an output
    layer."""
    return any(name.endswith(REWARDS) for name in config.architectures or ())


def is_reward_model(model: nn.Module) -> bool:
    return type(model).__name__.endswith(REWARDS)


def reward_model(model: Any, data: Any) -> PreTrainedModel:
    """Returns a language model of transformers with a new head, initialized by the library, in
    place of its output layer; a reward model stays. Raises InputError if transformers has no such
    class, or the head has more outputs."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    config: Any = getattr(model, "config", None)
    rewarding: Any = model
    if not is_reward_model(model):
        kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
        if kind is not None:
            config.num_labels = 1
            with torch.device("meta"):
                rewarding = kind(config)
        has_head = hasattr(rewarding, HEAD)
        if not has_head or type(rewarding.base_model) is not type(model.base_model):
            which = getattr(config, "model_type", type(model).__name__)
            raise InputError(
                "model.preference.loss reward: transformers has no class with a reward head for"
                f" {which}: take weights of another architecture"
            )
        setattr(rewarding, rewarding.base_model_prefix, model.base_model)
        rewarding.score = nn.Linear(rewarding.score.in_features, 1, bias=False)
        initialize(rewarding, rewarding.score)
        rewarding.train(model.training)
    elif model.score.out_features != 1:
        raise InputError(
            f"model.preference.loss reward: the weights have a head of {model.score.out_features}"
            " outputs, and a reward is one: take other weights as model.pretrained"
        )
    tokenizer = getattr(data, "text_tokenizer", None)
    padding = getattr(tokenizer, "pad_token_id", None)
    if padding is None:  # as trl
        padding = data.eos_token_id
    config.get_text_config().pad_token_id = padding
    config.problem_type = "regression"  # else vLLM returns the reward's sigmoid
    return rewarding


def refuse_reward_model(model: nn.Module, name: str | None) -> None:
    """Raises InputError if weights that are to give next tokens cannot."""
    if is_reward_model(model):
        raise InputError(
            f"model.pretrained {name!r} is a reward model, which scores and has no output layer:"
            " set model.preference.loss reward, or give other weights"
        )


@contextmanager
def every_reward(model: Any) -> Generator[None]:
    """Inside, the logits of a forward pass of `model` are the head's output at each token, (B, T,
    1). FSDP2's and ZeRO's hooks, which run later, take them for the model's output."""
    rewards: list[Tensor] = []

    def keep(head: nn.Module, inputs: object, output: Tensor) -> None:
        rewards.append(output)

    def replace(model: nn.Module, inputs: object, output: Any) -> Any:
        output.logits = rewards.pop()
        return output

    handles = [
        model.score.register_forward_hook(keep),
        model.register_forward_hook(replace, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
