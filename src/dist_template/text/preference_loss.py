"""The loss of preferences: chosen answers become more probable than rejected ones, compared with a
reference, the model before training.

The reference is the model with its adapters switched off, or a frozen copy, placed by the same
strategy. Checkpoints contain the copy's hash only.

Shapes: P pairs of a micro-batch, B sequences, T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .. import weights
from ..callbacks.global_order import eval_batches
from ..checkpoint.frozen import exclude_frozen, hash_frozen
from ..compat.transformers import without_adapters
from ..parallel.place import place
from ..records import write_atomically
from .batches.rows import PAIRS, SCORES
from .cache.token_cache import SPLITS


@dataclass
class PreferenceConfig:
    """The loss of pairs, with data.source Preferences.

    Args:
        loss: dpo (arXiv:2305.18290). ipo (arXiv:2310.12036), which bounds the difference. simpo
            (arXiv:2405.14734), which has no reference. ipo and simpo compare means per token.
        beta: Scale of the rewards: a larger one keeps the model closer to the reference.
        margin: Of simpo alone: by how much the chosen answer's reward has to be larger.
        precompute: Compute the reference's log-probabilities of all pairs once, before training,
            and keep them in the token cache. No copy is in memory during training.
    """

    loss: Literal["dpo", "ipo", "simpo"] = "dpo"
    beta: float = 0.1
    margin: float = 0.5
    precompute: bool = False


def has_pairs(data: object) -> bool:
    return getattr(getattr(data, "source", None), "pairs", False)


def add_reference(module: Any) -> None:
    """Gives `module` its reference, if the loss and the data need one: a copy, or its scores."""
    module.reference = None
    if not has_pairs(module.data) or module.preference.loss == "simpo":
        return
    if module.adapter is None or module.adapter.trainable:

        def build() -> nn.Module:
            model = module.build_model(module.data).requires_grad_(False)
            module.frozen_reference = hash_frozen(model, type(model).__name__)
            return model

        # Lightning warns of modules in eval mode, in which only the reference's passes are
        module.reference = place(build, module.trainer.strategy, module.blocks).train()
        module.frozen_reference = weights.broadcast(module.frozen_reference)
        exclude_frozen(module, "reference.")
    if module.preference.precompute:
        module.reference = module.reference or module.model
        module.data.reference_scores = _known_scores(module)
        module.reference = None


def _known_scores(module: Any) -> dict[str, np.ndarray]:
    """Returns `_scores` by split, from the token cache if they are there. Collective."""
    base, data = module.frozen_reference or module.frozen_base, module.data
    key = [base and base["sha256"], getattr(module.model, "config", None), module.adapter]
    key = repr([*key, data.seq_len, module.trainer.precision])
    path = data.corpus.folder / f"reference-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
    is_known = weights.is_rank_zero() and path.exists()
    known = weights.broadcast(json.loads(path.read_text()) if is_known else None)
    known = known or {split: _scores(module, split) for split in SPLITS}
    if weights.is_rank_zero() and not is_known:
        with suppress(OSError):  # the cache may be read-only: computed again next time
            write_atomically(path, json.dumps(known))
    return {split: np.array(bits, np.int32).reshape(-1, 2) for split, bits in known.items()}


@torch.no_grad()
def _scores(module: Any, split: str) -> list[int]:
    """Returns the reference's log-probabilities of each pair's answers, as bits of float32; NaN of
    pairs that are in no row. Collective: each data-parallel rank computes its part."""
    data, strategy = module.data, module.trainer.strategy
    rows, found = data.rows_of(split), []
    # numbers of the answers, which a batch then has in place of scores
    rows.scores = np.arange(2 * len(rows.starts) - 2, dtype=np.int32).reshape(-1, 2)
    for numbers in eval_batches(rows.sizes, data.micro_batch_size, data.rank, data.world_size):
        batch = data.transform(rows.__getitems__(numbers))
        batch = move_data_to_device(batch, strategy.root_device)
        with _as_reference(module), strategy.precision_plugin.forward_context():
            found.append((batch[SCORES].tolist(), _log_probabilities(module, batch)[0].tolist()))
    scores = np.full(rows.scores.size, np.nan, dtype=np.float32)
    for of_rank in weights.from_all_ranks(found):
        for answers, values in of_rank:
            scores[answers] = values
    return scores.view(np.int32).tolist()


def pair_sums(module: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns sums over the pairs of a micro-batch: the loss, and as metrics the rewards.

    A reward is beta times the log-ratio of an answer's probabilities, model to reference.
    """
    config = module.preference
    reference: Tensor | float = 0.0
    if SCORES in batch:
        reference = batch[SCORES].view(torch.float32)
    elif config.loss != "simpo":
        with _as_reference(module), torch.no_grad():
            reference = _log_probabilities(module, batch)[0]
    scores, lengths = _log_probabilities(module, batch)  # (P, 2) each
    scores = scores - reference
    if config.loss != "dpo":
        scores = scores / lengths
    difference = scores[:, 0] - scores[:, 1]
    if config.loss == "ipo":
        losses = (difference - 1 / (2 * config.beta)).square()
    else:
        margin = config.margin if config.loss == "simpo" else 0.0
        losses = -F.logsigmoid(config.beta * difference - margin)
    chosen, rejected = (config.beta * scores.detach()).unbind(1)
    return {
        "loss": losses.sum(),
        "rewards/chosen": chosen.sum(),
        "rewards/rejected": rejected.sum(),
        "rewards/margin": (chosen - rejected).sum(),
        "rewards/accuracy": (chosen > rejected).sum(),
    }


def _log_probabilities(module: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the log-probability (P, 2) of each pair's answers, and their numbers of tokens."""
    labels = batch["labels"].flatten()
    logits = module(batch).float().flatten(0, 1)
    log_probabilities = -F.cross_entropy(logits, labels, reduction="none")  # 0 for label -100
    position = torch.arange(len(labels), device=labels.device)
    edges = batch[PAIRS].unsqueeze(-1)  # (P, 3, 1)
    inside = (edges[:, :2] <= position) & (position < edges[:, 1:])  # (P, 2, B x T)
    counted = inside & (labels != -100)
    return (inside * log_probabilities).sum(-1), counted.sum(-1)


@contextmanager
def _as_reference(module: Any) -> Generator[None]:
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
    if module.reference is not None:
        for unit in reference.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()  # FSDP2 keeps the outermost unit for a backward pass
