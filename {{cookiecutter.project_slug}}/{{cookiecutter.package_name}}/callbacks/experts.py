"""How evenly a mixture-of-experts model uses its experts."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from ..flops import find_experts, num_experts
from .training_log import logs

LOADS = "moe/loads"  # tokens of each expert, on their way to all ranks


class Experts(Callback):
    """moe/expert_load_max_over_mean of the most uneven layer, moe/unused_experts of all layers.

    Looks at the optimizer steps that end in a log step, all micro-batches and ranks of them, and costs nothing in the
    others. Each layer's choice is taken from the call of its experts, on the device, before expert parallelism sends
    tokens away; what activation checkpointing computes again is not counted again. Knows the experts of transformers 5
    (stacked tensors, called with the indices of the chosen experts); others have no moe/*. They drop no token, so
    there is no dropped share.

    A compiled block is compiled for counting and for not counting: to have both done in the first two steps, the first
    micro-batch is looked at too.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        found = find_experts(pl_module)
        # Those that transformers' `use_experts_implementation` has made, and so are called with indices.
        self._layers = [(experts, num_experts(experts)) for experts in found if hasattr(experts, "is_concatenated")]
        if not self._layers:
            return
        self._is_first = True
        width = max(num for _, num in self._layers) + 1  # the last: an index that stands for no expert
        self._loads = torch.zeros(len(self._layers), width, device=pl_module.device)
        self._counter = Counter()
        for (experts, _), loads in zip(self._layers, self._loads, strict=True):
            hook = self._counter.hook(loads)
            self._handles.append(experts.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._handles:
            self._counter.counts = self._is_first or logs(trainer, trainer.global_step + 1)
            self._is_first = False

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Tensor) -> None:
        if self._handles:
            self._counter.counts = False  # a checkpointed block runs again in backward

    def before_log_step(self, trainer: Any, module: Any) -> None:
        if self._handles:
            module.metrics.put_counts(LOADS, self._loads.flatten())

    def on_log_step(self, trainer: Any, module: Any, metrics: dict[str, float]) -> None:
        if not self._handles:
            return
        self._loads.zero_()
        totals, width = module.metrics.totals[LOADS], self._loads.shape[1]
        worst, unused = 0.0, 0
        for layer, (_, num) in enumerate(self._layers):
            loads = totals[layer * width : layer * width + num]
            worst = max(worst, max(loads) * num / max(sum(loads), 1.0))
            unused += loads.count(0.0)
        metrics["moe/expert_load_max_over_mean"] = worst
        metrics["moe/unused_experts"] = unused

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class Counter:
    """Hooks that add to counts while it is told to."""

    def __init__(self) -> None:
        self.counts = False

    def hook(self, loads: Tensor) -> Any:
        def count(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.counts:
                tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
                chosen = next(tensor for tensor in tensors if not tensor.is_floating_point())  # (tokens, chosen ones)
                loads.scatter_add_(0, chosen.reshape(-1), loads.new_ones(()).expand(chosen.numel()))

        return count
