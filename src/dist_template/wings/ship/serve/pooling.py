"""Scores by a reward model, in the form of vLLM's POST /pooling."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from .conversation import fit_to_template

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MOST_TEXTS = 64  # of a request: they are scored one by one


def scored(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, body: dict[str, Any]
) -> dict:
    """Returns the answer to a request with `messages`, a conversation with its answer, or `input`,
    one or several texts of prompt and answer. Texts end with EOS, as in training. Raises ValueError
    if a request is wrong."""
    if body.get("model", name) != name:
        raise ValueError(f"the model is {name!r}; requested {body['model']!r}")
    unknown = sorted(body.keys() - {"model", "messages", "input", "user"})
    if unknown:
        raise ValueError(f"{unknown[0]} is not read; give messages or input, one of them")
    if ("messages" in body) == ("input" in body):
        raise ValueError("give messages or input, one of them")
    if "messages" in body:
        fit_to_template(body, tokenizer, asks=False)
        found: Any = tokenizer.apply_chat_template(body["messages"], tools=body.get("tools"))
        sequences = [found["input_ids"]]
    else:
        texts = _texts(body["input"])
        end = str(tokenizer.eos_token)
        sequences = [tokenizer(text.removesuffix(end) + end)["input_ids"] for text in texts]
    most = getattr(model.config, "max_position_embeddings", None)
    if not most:  # no limit, as of models without learned positions
        most = float("inf")
    longest = max(map(len, sequences))
    if not 0 < longest <= most:
        raise ValueError(f"the input has {longest} tokens, and the model has {most} positions")
    data = []
    with torch.inference_mode():
        for index, tokens in enumerate(sequences):
            reward = model(input_ids=torch.tensor([tokens], device=model.device)).logits[0].tolist()
            data.append({"index": index, "object": "pooling", "data": reward})
    num = sum(map(len, sequences))
    usage = {"prompt_tokens": num, "total_tokens": num, "completion_tokens": 0}
    return {
        "object": "list",
        "created": int(time.time()),
        "model": name,
        "data": data,
        "usage": usage,
    }


def _texts(given: Any) -> list[str]:
    """Returns the texts of `input`. Raises ValueError if it has none, too many, or other values."""
    texts = [given] if isinstance(given, str) else given
    is_list = isinstance(texts, list) and 0 < len(texts) <= MOST_TEXTS
    if not is_list or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"input has to be a text or 1 to {MOST_TEXTS} texts")
    return texts
