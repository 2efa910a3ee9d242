"""Multi-token prediction: modules beside the model predict later tokens than the next one
(DeepSeek-V3, arXiv:2412.19437, 2.2).

`text/model/mtp.py` has the modules. For each micro-batch:

    1. the batch gets the tokens that each module is given, and its labels (`look_ahead`)
    2. in the forward pass the output layer gets the modules' hidden states after the model's own
    3. the loss is the model's own plus `weight` times the modules' mean
    4. in evaluation, the modules' most probable tokens are compared with the model's (`accepted`)

Shapes: B sequences, T tokens of a sequence, W width, D modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...by_tokens import NonNegativeByTokens, check_phases
from ...compat import replaced
from ...model.any_module import value_now
from ...model.metrics import NOT_COUNTED
from ...parallel.mesh.sequence import UNSHARDED
from ..model.causal_lm import read_modules
from ..model.head import ChunkedLoss, without_head
from ..model.mtp import NAME, Predictor, add_modules
from .next_token import NextToken
from .objective import Batch, Measure, Part, Sums, source_kind

if TYPE_CHECKING:
    from ...parallel.configured import Configured

__all__ = ["MultiToken"]

KEY = "model.mtp.weight"
ACCEPTED, COMPARED = "mtp_accepted", "mtp_compared"  # numbers of tokens


@dataclass
class MtpConfig:
    """Multi-token prediction by the `num_mtp_layers` modules of the model's architecture.

    Args:
        weight: Weight of the modules' mean loss beside the model's own; 0.3 for DeepSeek-V3's first
            10 T tokens, then 0.1 (arXiv:2412.19437, section 4.2). Or phases by consumed tokens.
    """

    weight: NonNegativeByTokens = 0.3

    def __post_init__(self) -> None:
        check_phases(KEY, self.weight)


class MultiToken(NextToken):
    """Cross-entropy of the next token and of later ones."""

    key: ClassVar[str] = "model.mtp"
    figures = (ACCEPTED, COMPARED)
    measures = {"mtp_acceptance": Measure(ACCEPTED, COMPARED)}
    phases = ("mtp.weight",)
    part = Part(
        NAME,
        "Whether the folder has the modules of model.mtp, by which servers decode speculatively.",
    )

    def __init__(self, config: MtpConfig) -> None:
        self.config = config
        # (2, D, B, T) of the newest batch of an evaluation: see `accepted`
        self.accepted: Tensor | None = None

    def refusals(self, setup: Configured) -> Iterator[str]:
        for key, is_set in (
            ("data.source with pairs", source_kind(setup.data) != "texts"),
            ("model.distillation", setup.setting("distillation")),
            ("model.adapter", setup.setting("adapter")),
        ):
            if is_set:
                yield f"model.mtp does not work with {key}: set model.mtp null, or remove the other"

    def fixed_settings(self) -> dict[str, object]:
        return {KEY: self.config.weight}

    def extend(self, module: Any, network: nn.Module, data: Any) -> nn.Module:
        network = add_modules(super().extend(module, network, data))
        pretrained = getattr(module, "pretrained", None)
        if pretrained:
            read_modules(network, pretrained)
        return network

    def extend_batch(self, module: Any, batch: Batch) -> Batch:
        return look_ahead(batch, _depth_of(module.model))

    def sums(self, module: Any, batch: Batch) -> Sums:
        """Returns `sums` of a micro-batch, before them what is minimized, and after them
        `mtp_loss`, the modules' mean.

        In evaluation also ACCEPTED, the tokens that the modules predict as the model itself does
        one step later, which speculative decoding would accept, and COMPARED."""
        depth = _depth_of(module.model)
        inputs: list[Tensor] = []
        labels = [batch["labels"]]
        for k in range(1, depth + 1):
            inputs.append(batch[f"{NAME}_input_ids_{k}"])
            labels.append(batch[f"{NAME}_labels_{k}"])

        in_chunks = module.chunked_loss.applies_to(batch["labels"])
        with _predicting(module.model, inputs):
            if in_chunks:
                with without_head(module.model) as hidden_states:
                    outputs = hidden_states(module(batch))
            else:
                outputs = module(batch)
        parts = outputs.chunk(1 + depth)  # the model's own, and each module's

        sums_of = module.chunked_loss if in_chunks else partial(self.sums_at_once, module)
        own = sums_of(parts[0], labels[0])
        losses = []  # of the modules
        for part, part_labels in zip(parts[1:], labels[1:], strict=True):
            losses.append(_first_of(sums_of(part, part_labels)))
        predicted = torch.stack(losses).mean()
        weight = value_now(module, KEY, self.config.weight)
        result = {"objective": _first_of(own) + weight * predicted}
        for name, value in own.items():
            if name != "objective":
                result[name] = value.detach()
        result["mtp_loss"] = predicted.detach()

        if not torch.is_grad_enabled():
            if in_chunks:
                tokens = [_greedy(module.chunked_loss, part) for part in parts]
            else:
                tokens = [part.argmax(-1) for part in parts]
            group = None
            if UNSHARDED in batch:
                group = module.trainer.strategy.sequence_group
            self.accepted = accepted(tokens, labels, group)
            result[ACCEPTED], result[COMPARED] = self.accepted.sum((1, 2, 3))
        return result

    def derive(self, module: Any, metrics: dict[str, float]) -> None:
        super().derive(module, metrics)
        if isinstance(self.config.weight, list):
            metrics["train/mtp_weight"] = value_now(module, KEY, self.config.weight)

    def summarize(self, means: dict[str, float]) -> None:
        super().summarize(means)
        compared = means.pop(COMPARED, 0.0)
        if compared:
            means["mtp_acceptance"] = means.pop(ACCEPTED) / compared

    # ---- verbs -----------------------------------------------------------------------------------

    def own_blocks(self, network: nn.Module) -> int:
        return _depth_of(network)  # each module runs a block

    def forwarding(self, network: nn.Module, tokens: Tensor) -> AbstractContextManager[object]:
        modules: Any = network.get_submodule(NAME)
        return modules.predicting([tokens] * modules.depth)

    def copied(self, network: nn.Module) -> None:
        modules: Any = network.get_submodule(NAME)
        modules.attach(network)

    def newest_figures(self) -> Tensor:
        assert self.accepted is not None
        return self.accepted.sum(1)

    def keys_without(self, config: Any) -> dict[str, object]:
        has_modules = getattr(config, "num_mtp_layers", 0)
        return {} if has_modules else {"mtp": None}


def _first_of(sums: Sums) -> Tensor:
    """Returns what is minimized."""
    return next(iter(sums.values()))


def _predicting(network: nn.Module, inputs: list[Tensor]) -> AbstractContextManager[object]:
    """Inside, the network's output has the predictions of its modules after its own. The other
    stages of a pipeline have a module without parameters, and end before the output layer."""
    modules = network.get_submodule(NAME)
    if isinstance(modules, Predictor):
        return modules.predicting(inputs)
    return nullcontext()


def _depth_of(network: nn.Module) -> int:
    """Returns how many tokens beyond the next one are predicted."""
    modules: Any = network.get_submodule(NAME)
    return modules.depth


def look_ahead(batch: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Returns the batch with the tokens (B, T) that each module is given, and its labels: none in
    another document."""
    extended = dict(batch)
    tokens, labels, positions = batch["input_ids"], batch["labels"], batch["position_ids"]
    for k in range(1, depth + 1):
        # positions count from each document's start
        is_inside = F.pad(positions[:, k:], (0, k), value=-1) == positions + k
        later = F.pad(labels[:, k:], (0, k), value=NOT_COUNTED)
        extended[f"{NAME}_input_ids_{k}"] = F.pad(tokens[:, k:], (0, k))
        extended[f"{NAME}_labels_{k}"] = later.masked_fill(~is_inside, NOT_COUNTED)
    return extended


def accepted(tokens: list[Tensor], labels: list[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """Returns (2, D, B, T): which of the modules' most probable tokens the model predicts too, and
    which count.

    Args:
        tokens: (B, T) each, of the model and of each module.
        labels: Likewise.
        group: The ranks that have T tokens each of longer sequences. None: sequences are on one
            rank."""
    own = tokens[0].contiguous()  # as all_gather needs it
    num, start = own.shape[1], 0
    if group is not None:
        of_ranks = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(of_ranks, own, group=group)
        own, start = torch.cat(of_ranks, dim=1), group.rank() * num
    of_modules = []
    for k in range(1, len(tokens)):
        later = F.pad(own, (0, k))[:, start + k : start + k + num]
        counted = labels[k] != NOT_COUNTED
        is_accepted = counted & (tokens[k] == later)
        of_modules.append(torch.stack([is_accepted, counted]))
    return torch.stack(of_modules, dim=1)


def _greedy(loss: ChunkedLoss, hidden: Tensor) -> Tensor:
    """Returns the most probable token (B, T) of each position."""
    tokens: list[Tensor] = []  # of each chunk

    def keep(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        tokens.append(logits.argmax(-1))
        return {"kept": logits.new_zeros(())}

    no_labels = torch.zeros_like(hidden[..., 0], dtype=torch.int64)
    with replaced(loss, sums=keep, blend=None):
        loss(hidden, no_labels)
    return torch.cat(tokens, dim=1).view(hidden.shape[:2])
