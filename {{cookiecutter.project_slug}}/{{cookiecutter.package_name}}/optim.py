"""How parameters are updated: parameter groups, AdamW, the schedule per optimizer step.

The schedules themselves are `transformers.get_scheduler`'s; this file only translates our keys into its.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from .errors import InputError
from .parallel.layout import by_layout, whole_shape

Schedule = Literal["cosine", "linear", "constant", "warmup_stable_decay", "inverse_sqrt", "reduce_on_plateau"]


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule.

    Args:
        learning_rate: Peak learning rate, reached at the end of the warm-up.
        weight_decay: AdamW's decoupled decay, on matrices alone: biases, norms and other vectors have none. 0 is off.
        betas: AdamW's decay rates of the first and the second moment.
        eps: AdamW's term that keeps the denominator from zero.
        schedule: Shape of the learning rate over optimizer steps after the warm-up.
        warmup: Steps of linear warm-up when 1 or more, a share of all steps when below 1. 0 is off.
        min_learning_rate_share: Where cosine and warmup_stable_decay end, as a share of the peak. 0 decays to zero.
        decay_share: Share of all steps in which warmup_stable_decay falls.
        plateau_metric: What reduce_on_plateau watches, after each validation.
        plateau_patience: Validations without improvement before reduce_on_plateau lowers the learning rate.
        plateau_factor: What reduce_on_plateau multiplies the learning rate by.
    """

    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    schedule: Schedule = "cosine"
    warmup: float = 0.03
    min_learning_rate_share: float = 0.1
    decay_share: float = 0.2
    plateau_metric: str = "eval/loss"
    plateau_patience: int = 2
    plateau_factor: float = 0.5


def build_optimizer(module: nn.Module, config: OptimConfig, scaled: bool = False) -> Optimizer:
    """AdamW over `module`'s trainable parameters, fused where torch has a fused kernel for their device.

    Args:
        module: With all of its parameters.
        config: The keys under `model.optim`.
        scaled: Gradients come multiplied, as float16 needs it. A fused step would divide them itself, after clipping
            has taken them for what they are not; another leaves that to the precision plugin, which does it before.
    """
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not trainable:
        raise InputError("no parameter of the module requires a gradient, so there is nothing to train; see module.py")
    # Stacked expert biases are matrices by shape, hence the look at the name as well.
    decayed = [p for name, p in trainable if len(whole_shape(p)) >= 2 and not name.endswith("bias")]
    kept = [p for name, p in trainable if len(whole_shape(p)) < 2 or name.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    fused = not scaled and all(p.device.type in ("cpu", "cuda", "xpu", "mps") for _, p in trainable)
    adamw = MixedAdamW if len(by_layout(p for _, p in trainable)) > 1 else torch.optim.AdamW
    return adamw(
        [g for g in groups if g["params"]], lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused
    )


class MixedAdamW(torch.optim.AdamW):
    """AdamW over parameters that lie differently over the ranks, of which its kernel takes one kind at a time.

    Outside of a step the parameter groups are those of every other strategy, so a schedule's state fits them all.
    """

    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        self.param_groups = [group | {"params": part} for group in groups for part in by_layout(group["params"])]
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups


def build_schedule(
    optimizer: Optimizer, config: OptimConfig, num_steps: float, batches_per_validation: int | None = None
) -> dict[str, Any]:
    """Lightning's scheduler entry for `config.schedule` over `num_steps` optimizer steps (inf: no end is set).

    `batches_per_validation` (of a rank) is when reduce_on_plateau looks at its metric; None: at the end of each epoch.

    Raises:
        InputError: the schedule needs an end and training has none, or the warm-up is longer than training.
    """
    from transformers import get_scheduler

    if config.schedule == "reduce_on_plateau":
        options = {"factor": config.plateau_factor, "patience": config.plateau_patience}
        scheduler = get_scheduler("reduce_lr_on_plateau", optimizer, scheduler_specific_kwargs=options)
        # Lightning updates it right after the validation of the same step, and counts in batches.
        when = {"interval": "step", "frequency": batches_per_validation} if batches_per_validation else {}
        return {"scheduler": scheduler, "monitor": config.plateau_metric, "reduce_on_plateau": True, **when}

    ends = num_steps != float("inf")
    if not ends and (config.warmup < 1 or config.schedule in ("cosine", "linear", "warmup_stable_decay")):
        raise InputError(
            f"schedule {config.schedule!r} with warmup {config.warmup} needs to know how long training is; "
            "set trainer.max_steps or trainer.max_epochs"
        )
    warmup_steps = int(config.warmup if config.warmup >= 1 else config.warmup * num_steps)
    if ends and warmup_steps >= num_steps:
        raise InputError(
            f"the warm-up of {warmup_steps} steps is not shorter than training, {num_steps:.0f} steps; "
            "lower model.optim.warmup or raise trainer.max_steps"
        )
    name, options = _transformers_schedule(config, warmup_steps, num_steps)
    total = int(num_steps) if ends else None
    scheduler = get_scheduler(name, optimizer, warmup_steps, total, scheduler_specific_kwargs=options)
    return {"scheduler": scheduler, "interval": "step"}


def _transformers_schedule(config: OptimConfig, warmup_steps: int, num_steps: float) -> tuple[str, dict[str, Any]]:
    """`config.schedule` as transformers names it, with the keyword arguments that only this schedule takes."""
    floor = config.min_learning_rate_share
    if config.schedule == "cosine":
        return "cosine_with_min_lr", {"min_lr_rate": floor}
    if config.schedule == "warmup_stable_decay":
        decay_steps = min(max(1, int(config.decay_share * num_steps)), int(num_steps) - warmup_steps)
        return "warmup_stable_decay", {"num_decay_steps": decay_steps, "min_lr_ratio": floor}
    if config.schedule == "constant":
        return "constant_with_warmup", {}
    return config.schedule, {}
